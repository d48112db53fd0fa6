/* Faults of the C library for the compiled appender alone, preloaded into its process (native.py).

   Each write and each sync meets a kind with the chance that `faults_one_in` says. Chance follows from `faults_seed` and
   the number of the call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { INTERRUPTED, SLOW, SHORT, TORN, FULL, BROKEN, KINDS };
#define EXPORTED __attribute__((visibility("default")))

EXPORTED uint64_t faults_seed;
EXPORTED unsigned faults_one_in[KINDS]; /* 0: none */
EXPORTED uint64_t faults_met[2][KINDS]; /* in writes, in syncs */
EXPORTED uint64_t faults_calls;
EXPORTED uint64_t faults_retried; /* calls that were made once more after an error of the same call (invariant 7) */

static _Thread_local int is_torn; /* the rest of its last write does not fit */
static unsigned char has_failed[2][1 << 16]; /* by descriptor */

static uint64_t scrambled(uint64_t x) { /* SplitMix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The errno that the call ends with; 0: it is made, perhaps later and with fewer bytes. */
static int drawn(int sync, size_t *size) {
    uint64_t chance = scrambled(faults_seed ^ __atomic_add_fetch(&faults_calls, 1, __ATOMIC_RELAXED));
    if (is_torn && !sync) return is_torn = 0, ENOSPC;
    for (int kind = 0; kind < KINDS; kind++) {
        unsigned one_in = __atomic_load_n(&faults_one_in[kind], __ATOMIC_RELAXED);
        chance = scrambled(chance);
        if (!one_in || chance % one_in || ((kind == SHORT || kind == TORN) && *size < 2)) continue;
        __atomic_add_fetch(&faults_met[sync][kind], 1, __ATOMIC_RELAXED);
        struct timespec pause = {0, (long)(chance / one_in % 5000000)};
        switch (kind) {
        case INTERRUPTED: return EINTR;
        case SLOW: nanosleep(&pause, NULL); break;
        case TORN: is_torn = 1; /* fall through */
        case SHORT: *size = 1 + chance / one_in % (*size - 1); return 0;
        case FULL: return ENOSPC;
        case BROKEN: return EIO;
        }
    }
    return 0;
}

static int spoil(const void *caller, int fd, int sync, size_t *size) {
    Dl_info from;
    if (!dladdr(caller, &from) || !strstr(from.dli_fname, "compiled_appender")) return 0;
    unsigned char *failed = &has_failed[sync][(unsigned short)fd];
    if (*failed) __atomic_add_fetch(&faults_retried, 1, __ATOMIC_RELAXED);
    int error = drawn(sync, size);
    *failed = error && error != EINTR;
    return error;
}

EXPORTED ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    int error = spoil(__builtin_return_address(0), fd, 0, &size);
    if (error) return errno = error, -1;
    return ((ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite"))(fd, data, size, offset);
}

EXPORTED int fdatasync(int fd) {
    int error = spoil(__builtin_return_address(0), fd, 1, &(size_t){0});
    if (error) return errno = error, -1;
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}

EXPORTED int close(int fd) {
    has_failed[0][(unsigned short)fd] = has_failed[1][(unsigned short)fd] = 0;
    return ((int (*)(int))dlsym(RTLD_NEXT, "close"))(fd);
}
