/* Many threads on one appender, beside fault hooks, for the sanitizers (test_appender_torture.py).

   torture THREADS ROUNDS SEED FILE: each thread puts batches and waits for some; now and then the segment changes, a
   write is short, or takes a while; in half of the runs one call fails at some time. At the end, and whenever a thread
   was told so, what it put is in the file, in order, and was synced. */
#define _GNU_SOURCE
#include "appender.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 24 };

static appender *log_of_all;
static pthread_mutex_t planning = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last, first_here, rounds, fail_at;
static uint64_t written_end, synced_end, calls_made; /* bytes of all segments; of `calls_made` atomically */
static uint64_t segment_start;
static int fd = -1;
static const char *path;
static int wrong;

static void complain(const char *what, uint64_t number) {
    fprintf(stderr, "%s: batch %llu\n", what, (unsigned long long)number);
    __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
}

static int fails(void) { return fail_at && __atomic_add_fetch(&calls_made, 1, __ATOMIC_RELAXED) >= fail_at; }

static void pause_now_and_then(uint64_t number) {
    if (number % 7 == 0) {
        struct timespec t = {0, 20000};
        nanosleep(&t, NULL);
    }
}

static ssize_t spoilt_write(int to, const void *data, size_t size, off_t offset) {
    if (fails()) return -EIO;
    if (size > BATCH && size % 5 == 0) size = size / 2; /* short */
    ssize_t done = pwrite(to, data, size, offset);
    if (done < 0) return -errno;
    uint64_t end = __atomic_load_n(&segment_start, __ATOMIC_ACQUIRE) + (uint64_t)offset + (uint64_t)done;
    uint64_t before = __atomic_load_n(&written_end, __ATOMIC_ACQUIRE);
    if (end > before) __atomic_store_n(&written_end, end, __ATOMIC_RELEASE);
    pause_now_and_then((uint64_t)offset / BATCH);
    return done;
}

static int spoilt_sync(int to) {
    uint64_t end = __atomic_load_n(&written_end, __ATOMIC_ACQUIRE);
    (void)to;
    if (fails()) return -EIO;
    pause_now_and_then(end / BATCH);
    __atomic_store_n(&synced_end, end, __ATOMIC_RELEASE);
    return 0;
}

static const appender_calls spoilt = {spoilt_write, spoilt_sync};

/* With `planning` held. */
static int put(int sync, uint64_t *number) {
    char data[BATCH + 1];
    if (last - first_here >= 500) { /* the next segment */
        int result;
        while ((result = appender_wait(log_of_all, last, 0.05)) == APPENDER_AGAIN) continue;
        if (result == APPENDER_PASS) appender_pass(log_of_all), result = APPENDER_OK;
        if (result != APPENDER_OK) return result;
        int next = open(path, O_RDWR | O_CREAT | O_APPEND | O_TRUNC, 0600);
        if (next < 0) abort();
        fcntl(next, F_SETFL, 0);
        while ((result = appender_segment(log_of_all, next, 0, 0.05)) == APPENDER_AGAIN) continue;
        if (result != APPENDER_OK) return result;
        close(fd);
        fd = next, first_here = last;
        __atomic_store_n(&segment_start, last * BATCH, __ATOMIC_RELEASE);
    }
    snprintf(data, sizeof data, "%023llu\n", (unsigned long long)last + 1);
    int result = appender_put(log_of_all, data, BATCH, last + 1, sync);
    if (result == APPENDER_OK) *number = ++last;
    return result;
}

static void *work(void *argument) {
    unsigned seed = (unsigned)(size_t)argument;
    for (uint64_t round = 0; round < rounds; round++) {
        uint64_t number = 0;
        int sync = rand_r(&seed) % 4 != 0, result;
        pthread_mutex_lock(&planning);
        result = put(sync, &number);
        pthread_mutex_unlock(&planning);
        if (result == APPENDER_FAILED) return NULL;
        if (result != APPENDER_OK) {
            complain("refused", number);
            return NULL;
        }
        switch (rand_r(&seed) % 8) {
        case 0: appender_kick(log_of_all); break;
        case 1: (void)appender_look(log_of_all); break;
        default:
            do result = sync ? appender_wait(log_of_all, number, 0.001) : appender_write(log_of_all, number, 0.001);
            while (result == APPENDER_AGAIN);
            if (result == APPENDER_PASS) appender_pass(log_of_all), result = APPENDER_OK;
            if (result == APPENDER_FAILED) return NULL;
            uint64_t end = __atomic_load_n(sync ? &synced_end : &written_end, __ATOMIC_ACQUIRE);
            if (end < number * BATCH) complain(sync ? "not on disk" : "not written", number);
        }
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    int threads = atoi(arguments[1]);
    rounds = (uint64_t)atoi(arguments[2]);
    unsigned seed = (unsigned)atoi(arguments[3]);
    path = arguments[4];
    if (seed % 2) fail_at = 1 + (uint64_t)rand_r(&seed) % (rounds * 4);
    appender_use(&spoilt);
    log_of_all = appender_new();
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || !log_of_all) return 2;
    appender_restart(log_of_all, 0);
    if (appender_segment(log_of_all, fd, 0, 1) != APPENDER_OK) return 2;
    pthread_t *all = calloc((size_t)threads, sizeof *all);
    for (int i = 0; i < threads; i++) pthread_create(&all[i], NULL, work, (void *)(size_t)(seed * 1000 + (unsigned)i));
    for (int i = 0; i < threads; i++) pthread_join(all[i], NULL);
    free(all);
    int result;
    while ((result = appender_wait(log_of_all, last, 1)) == APPENDER_AGAIN) continue;
    if (result == APPENDER_PASS) appender_pass(log_of_all), result = APPENDER_OK;
    if (result == APPENDER_FAILED && !fail_at) complain("failed", last);
    if (result == APPENDER_OK) { /* the last segment, from its first on */
        for (uint64_t number = first_here + 1; number <= last; number++) {
            char data[BATCH + 1] = {0}, expected[BATCH + 1];
            snprintf(expected, sizeof expected, "%023llu\n", (unsigned long long)number);
            if (pread(fd, data, BATCH, (off_t)((number - first_here - 1) * BATCH)) != BATCH || strcmp(data, expected))
                complain("not as it was put", number);
        }
    }
    while (appender_segment(log_of_all, -1, 0, 1) == APPENDER_AGAIN) continue;
    appender_release(log_of_all);
    close(fd);
    return wrong;
}
