#define _GNU_SOURCE
#include "appender.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if !defined(_POSIX_SYNCHRONIZED_IO) || _POSIX_SYNCHRONIZED_IO <= 0
#define fdatasync fsync /* called only where policies/platform_files.py has found that it makes a file durable */
#endif

enum { GATHER_MAX = 16, FIRST_BYTES = 1 << 16, KEPT_BYTES = 1 << 20 };
static const double GATHER_SECONDS_MAX = 0.005;
static const double PLAN_SECONDS = 0.00003; /* about what a caller takes for its next batch */
static const double QUICK_SECONDS = 0.0005;

typedef struct {
    unsigned char *data;
    size_t size, capacity;
} buffer;

typedef struct waiter { /* never on a stack: whoever wakes it may come late */
    struct waiter *next;
    uint64_t number;
    pthread_cond_t woken;
    int is_woken;
} waiter;

struct appender {
    pthread_mutex_t lock;    /* guards all of it; held for copying at most, never for a system call on the file */
    pthread_cond_t gathered; /* as many wait as the leader waits for */
    pthread_cond_t free;     /* nobody writes, or nobody syncs any more */
    waiter *waiters, **last; /* in the order in which they came */
    waiter *spare_waiters;
    int references; /* its owner's, and its helper's */
    int generation; /* of the process that made it: in a forked child a lock may be held for ever */
    int fd;
    uint64_t offset; /* where `fill` goes */
    buffer fill, spare;
    appender_state state;
    uint64_t want; /* somebody waits for the disk up to here */
    int writing, syncing, helped;
    int waiting;  /* batches that want a sync, since the last one was begun */
    int expected; /* how many came together lately; their threads are on their way back. 0: each comes alone */
    double sync_seconds;
    appender_durations took;
};

/* Time and conditions */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void condition_init(pthread_cond_t *condition) {
#ifdef __APPLE__
    pthread_cond_init(condition, NULL);
#else
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
#endif
}

/* Wait until it is signalled, or this time (of `now`) has come: false then. */
static int wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, double until) {
    double left = until - now();
    if (left <= 0) return 0;
#ifdef __APPLE__
    struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
    return pthread_cond_timedwait_relative_np(condition, lock, &t) != ETIMEDOUT;
#else
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    return pthread_cond_timedwait(condition, lock, &t) != ETIMEDOUT;
#endif
}

/* System calls */

static ssize_t system_write(int fd, const void *data, size_t size, off_t offset) {
    ssize_t written = pwrite(fd, data, size, offset);
    return written < 0 ? -errno : written;
}

static int system_sync(int fd) { return fdatasync(fd) ? -errno : 0; }

const appender_calls appender_system_calls = {system_write, system_sync};
static const appender_calls *calls = &appender_system_calls;

void appender_use(const appender_calls *others) { __atomic_store_n(&calls, others, __ATOMIC_RELEASE); }

static const appender_calls *used_calls(void) { return __atomic_load_n(&calls, __ATOMIC_ACQUIRE); }

/* Processes */

static int generation;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void forget_helpers(void);

static void forked(void) {
    generation++;
    forget_helpers();
}

static void prepare(void) { pthread_atfork(NULL, NULL, forked); }

static int is_ours(const appender *log) { return log->generation == generation; }

/* Making and letting go */

appender *appender_new(void) {
    pthread_once(&once, prepare);
    appender *log = calloc(1, sizeof *log);
    if (!log) return NULL;
    pthread_mutex_init(&log->lock, NULL);
    log->last = &log->waiters;
    condition_init(&log->gathered);
    condition_init(&log->free);
    log->references = 1;
    log->generation = generation;
    log->fd = -1;
    return log;
}

void appender_release(appender *log) {
    if (!is_ours(log)) { /* its memory is the parent's copy */
        if (log->fd >= 0) close(log->fd);
        return;
    }
    pthread_mutex_lock(&log->lock);
    int left = --log->references;
    pthread_mutex_unlock(&log->lock);
    if (left) return; /* a helper waits for the disk: it does the rest */
    pthread_mutex_destroy(&log->lock);
    for (waiter *one = log->spare_waiters, *next; one; one = next) {
        next = one->next;
        pthread_cond_destroy(&one->woken);
        free(one);
    }
    pthread_cond_destroy(&log->gathered);
    pthread_cond_destroy(&log->free);
    if (log->fd >= 0) close(log->fd);
    free(log->fill.data);
    free(log->spare.data);
    free(log);
}

int appender_segment(appender *log, int fd, uint64_t offset, double seconds) {
    if (!is_ours(log)) return APPENDER_FORKED;
    int result = APPENDER_OK, own = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && own < 0) return APPENDER_ERRNO - errno;
    double until = now() + seconds;
    pthread_mutex_lock(&log->lock);
    while ((log->writing || log->syncing) && !result)
        if (!wait_until(&log->free, &log->lock, until)) result = APPENDER_AGAIN;
    if (!result) {
        int before = log->fd;
        log->fd = own, log->offset = offset;
        own = before;
    }
    pthread_mutex_unlock(&log->lock);
    if (own >= 0) close(own);
    return result;
}

void appender_restart(appender *log, uint64_t lsn) {
    pthread_mutex_lock(&log->lock);
    log->want = 0;
    log->state = (appender_state){.lsn = lsn, .written_lsn = lsn, .durable_lsn = lsn, .syncs = log->state.syncs};
    pthread_mutex_unlock(&log->lock);
}

appender_state appender_look(appender *log) {
    pthread_mutex_lock(&log->lock);
    appender_state state = log->state;
    state.queued = log->fill.size, state.fd = log->fd, state.sync_seconds = log->sync_seconds;
    pthread_mutex_unlock(&log->lock);
    return state;
}

appender_durations appender_took(appender *log) {
    pthread_mutex_lock(&log->lock);
    appender_durations took = log->took;
    pthread_mutex_unlock(&log->lock);
    return took;
}

uint64_t appender_written(appender *log) { return __atomic_load_n(&log->state.written, __ATOMIC_ACQUIRE); }

uint64_t appender_durable(appender *log) { return __atomic_load_n(&log->state.durable, __ATOMIC_ACQUIRE); }

uint64_t appender_durable_lsn(appender *log) { return __atomic_load_n(&log->state.durable_lsn, __ATOMIC_ACQUIRE); }

/* Stop for good, with the lock held. */
static void fail(appender *log, int error) {
    log->state.failed = error;
    pthread_cond_broadcast(&log->gathered);
    for (waiter *one = log->waiters; one; one = one->next) pthread_cond_signal(&one->woken);
}

void appender_stop(appender *log) {
    if (!is_ours(log)) return;
    pthread_mutex_lock(&log->lock);
    if (!log->state.failed) fail(log, ECANCELED);
    pthread_mutex_unlock(&log->lock);
}

/* Queueing */

static int grow(buffer *batch, size_t size) {
    if (size <= batch->capacity) return 1;
    size_t capacity = batch->capacity ? batch->capacity : FIRST_BYTES;
    while (capacity < size) capacity *= 2;
    unsigned char *data = realloc(batch->data, capacity);
    if (!data) return 0;
    batch->data = data, batch->capacity = capacity;
    return 1;
}

int appender_put(appender *log, const void *data, size_t size, uint64_t lsn, int sync) {
    if (!is_ours(log)) return APPENDER_FORKED;
    int result = APPENDER_OK;
    pthread_mutex_lock(&log->lock);
    if (log->state.failed) result = APPENDER_FAILED;
    else if (!grow(&log->fill, log->fill.size + size)) result = APPENDER_NO_MEMORY;
    else {
        memcpy(log->fill.data + log->fill.size, data, size);
        log->fill.size += size;
        log->state.number++, log->state.lsn = lsn;
        if (sync) {
            log->want = log->state.number;
            if (++log->waiting >= log->expected) pthread_cond_signal(&log->gathered);
        }
    }
    pthread_mutex_unlock(&log->lock);
    return result;
}

/* Writing and syncing, with the lock held, which is let go of meanwhile */

/* Hand what is queued to the operating system, while nobody else does. */
static void write_fill(appender *log) {
    buffer batch = log->fill;
    uint64_t last = log->state.number, last_lsn = log->state.lsn, offset = log->offset;
    int fd = log->fd, error = 0;
    if (log->state.written == last) return;
    log->fill = log->spare, log->spare = (buffer){0};
    log->fill.size = 0;
    log->offset += batch.size;
    log->state.attempted = last;
    log->writing = 1;
    pthread_mutex_unlock(&log->lock);
    for (size_t done = 0; done < batch.size && !error;) {
        ssize_t n = used_calls()->write(fd, batch.data + done, batch.size - done, (off_t)(offset + done));
        if (n > 0) done += (size_t)n;
        else if (n != -EINTR) error = n ? (int)-n : EIO;
    }
    pthread_mutex_lock(&log->lock);
    if (batch.capacity > KEPT_BYTES) free(batch.data), batch = (buffer){0};
    log->spare = batch;
    log->writing = 0;
    if (error) {
        fail(log, error);
    } else {
        log->state.written_lsn = last_lsn;
        __atomic_store_n(&log->state.written, last, __ATOMIC_RELEASE);
    }
    pthread_cond_broadcast(&log->free);
}

static int ask_help(appender *log);

/* Wake the first of those who have what they wait for, unless it is awake: it wakes the next one (`appender_pass`) once it
   has the interpreter, so that they do not stand in line for that all at once. Returns whom to signal, best once the lock
   is let go of: who wakes runs at once, perhaps, and needs it. */
static waiter *next_to_wake(appender *log) {
    for (waiter *one = log->waiters; one; one = one->next)
        if (one->number <= log->state.durable) {
            if (one->is_woken) return NULL;
            one->is_woken = 1;
            return one;
        }
    return NULL;
}

/* Expect as many as came for the last sync and during it: each sync takes as much of a processor as some ten batches. Two
   that are quick take turns instead. */
static void expect(appender *log, int together) {
    int least = log->sync_seconds < QUICK_SECONDS ? 3 : 2;
    int most = together * PLAN_SECONDS < log->sync_seconds ? 4 * GATHER_MAX : GATHER_MAX;
    log->expected = together < least ? 0 : together < most ? together : most;
}

double appender_bounds[APPENDER_BUCKETS - 1];

static void count(appender *log, double took) {
    int bucket = 0;
    while (bucket < APPENDER_BUCKETS - 1 && took > appender_bounds[bucket]) bucket++;
    log->took.counts[bucket]++, log->took.seconds += took;
}

/* One write and one sync, for all who wait, while nobody else syncs. */
static void lead(appender *log) {
    log->syncing = 1;
    double most = log->sync_seconds < GATHER_SECONDS_MAX ? log->sync_seconds : GATHER_SECONDS_MAX;
    for (double until = now() + most; log->waiting < log->expected && !log->state.failed;)
        if (!wait_until(&log->gathered, &log->lock, until)) break;
    while (log->writing) pthread_cond_wait(&log->free, &log->lock);
    int shared = log->waiting, error = 0;
    log->waiting = 0;
    if (!log->state.failed) write_fill(log);
    if (!log->state.failed) {
        uint64_t target = log->state.written, target_lsn = log->state.written_lsn;
        int fd = log->fd;
        pthread_mutex_unlock(&log->lock);
        double began = now();
        while ((error = used_calls()->sync(fd)) == -EINTR) continue;
        double took = now() - began;
        pthread_mutex_lock(&log->lock);
        log->state.syncs++;
        count(log, took);
        if (took > 2 * log->sync_seconds + 0.001) took = 2 * log->sync_seconds + 0.001; /* a stall is no measure */
        log->sync_seconds = 0.7 * log->sync_seconds + 0.3 * took;
        if (error) fail(log, -error); /* never tried again (invariant 7) */
        else if (target > log->state.durable) {
            __atomic_store_n(&log->state.durable_lsn, target_lsn, __ATOMIC_RELEASE);
            __atomic_store_n(&log->state.durable, target, __ATOMIC_RELEASE);
        }
        expect(log, shared + log->waiting);
    }
    log->syncing = 0;
    pthread_cond_broadcast(&log->free);
    waiter *next = next_to_wake(log);
    if (next) pthread_cond_signal(&next->woken);
    if (!log->state.failed && log->want > log->state.durable) ask_help(log);
}

int appender_write(appender *log, uint64_t number, double seconds) {
    if (!is_ours(log)) return APPENDER_FORKED;
    int result = APPENDER_OK;
    double until = 0;
    pthread_mutex_lock(&log->lock);
    while (log->state.written < number && !log->state.failed && !result) {
        if (!log->writing) write_fill(log);
        else {
            if (!until) until = now() + seconds;
            if (!wait_until(&log->free, &log->lock, until)) result = APPENDER_AGAIN;
        }
    }
    if (log->state.failed && log->state.written < number) result = APPENDER_FAILED;
    pthread_mutex_unlock(&log->lock);
    return result;
}

/* Wait until somebody wakes this one, with the lock held, which is let go of meanwhile. */
static int wait_here(appender *log, uint64_t number, double until) {
    waiter *me = log->spare_waiters;
    if (me) log->spare_waiters = me->next;
    else {
        if (!(me = calloc(1, sizeof *me))) return APPENDER_NO_MEMORY;
        condition_init(&me->woken);
    }
    me->next = NULL, me->number = number, me->is_woken = 0;
    *log->last = me, log->last = &me->next;
    int came = 1;
    while (!me->is_woken && log->state.durable < number && !log->state.failed && came)
        came = wait_until(&me->woken, &log->lock, until);
    waiter **at = &log->waiters;
    while (*at != me) at = &(*at)->next;
    if (!(*at = me->next)) log->last = at;
    me->next = log->spare_waiters, log->spare_waiters = me;
    return came || me->is_woken ? APPENDER_OK : APPENDER_AGAIN;
}

int appender_wait(appender *log, uint64_t number, double seconds) {
    if (!is_ours(log)) return APPENDER_FORKED;
    if (appender_durable(log) >= number) return APPENDER_OK;
    int result = APPENDER_OK, parked = 0;
    double until = now() + seconds;
    pthread_mutex_lock(&log->lock);
    while (log->state.durable < number && !result) {
        if (log->state.failed) result = APPENDER_FAILED;
        else if (log->writing && !log->syncing) { /* not as a leader, who waits for as long as it takes */
            if (!wait_until(&log->free, &log->lock, until)) result = APPENDER_AGAIN;
        } else if (!log->syncing && !log->helped && (log->expected < 2 || !ask_help(log))) {
            if (log->want < number) log->want = number;
            lead(log);
        } else {
            if (log->want < number) log->want = number;
            result = wait_here(log, number, until);
            if (result == APPENDER_OK) parked = 1;
        }
    }
    if (log->state.durable >= number) result = parked ? APPENDER_PASS : APPENDER_OK;
    pthread_mutex_unlock(&log->lock);
    return result;
}

void appender_pass(appender *log) {
    pthread_mutex_lock(&log->lock);
    waiter *next = next_to_wake(log);
    pthread_mutex_unlock(&log->lock);
    if (next) pthread_cond_signal(&next->woken); /* it stays where it is, whoever uses it by then */
}

/* Helpers: threads of the process that lead where nobody does. One stays with its log as long as somebody waits, and
   there are as many as logs that need one at once: a disk that hangs holds up no other. */

typedef struct job {
    struct job *next;
    appender *log;
} job;

static pthread_mutex_t help_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t help_wanted = PTHREAD_COND_INITIALIZER;
static job *jobs, **jobs_end = &jobs;
static int idle, asked;

static void forget_helpers(void) { /* in a forked child, where there are none */
    pthread_mutex_init(&help_lock, NULL);
    pthread_cond_init(&help_wanted, NULL);
    jobs = NULL, jobs_end = &jobs;
    idle = asked = 0;
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&help_lock);
    for (;;) {
        while (!jobs) {
            idle++;
            pthread_cond_wait(&help_wanted, &help_lock);
            idle--;
        }
        job *mine = jobs;
        if (!(jobs = mine->next)) jobs_end = &jobs;
        asked--;
        pthread_mutex_unlock(&help_lock);
        appender *log = mine->log;
        free(mine);
        pthread_mutex_lock(&log->lock);
        while (log->want > log->state.durable && !log->state.failed) {
            if (!log->syncing) lead(log);
            else pthread_cond_wait(&log->free, &log->lock); /* who is alone leads itself */
        }
        log->helped = 0;
        pthread_mutex_unlock(&log->lock);
        appender_release(log);
        pthread_mutex_lock(&help_lock);
    }
    return NULL;
}

/* With the log's lock held: have a helper lead until nobody waits. False: there is none. */
static int ask_help(appender *log) {
    if (log->helped) return 1;
    job *mine = malloc(sizeof *mine);
    if (!mine) return 0;
    *mine = (job){NULL, log};
    int found = 1;
    pthread_mutex_lock(&help_lock);
    if (idle <= asked) { /* each of the idle ones has something to do already */
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 1 << 18);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's threads' */
        found = !pthread_create(&thread, &attributes, help, NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    if (found) {
        *jobs_end = mine, jobs_end = &mine->next;
        asked++;
        log->helped = 1, log->references++;
        pthread_cond_signal(&help_wanted);
    }
    pthread_mutex_unlock(&help_lock);
    if (!found) free(mine);
    return found;
}

void appender_kick(appender *log) {
    if (!is_ours(log)) return;
    pthread_mutex_lock(&log->lock);
    if (log->want > log->state.durable && !log->state.failed && !log->syncing) ask_help(log);
    pthread_mutex_unlock(&log->lock);
}
