/* The writing end of a log: framed batches in, bytes on the disk; no Python in here.

   A thread puts batches into memory, which are numbered from 1 on, and then waits until they are written, or on disk.
   What has gathered meanwhile is written with one call and synced with one. A thread that is alone does that itself;
   where several come, a helper does, so that the disk is never idle, and all of them wait without the interpreter. */
#ifndef APPENDER_H
#define APPENDER_H
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { APPENDER_PASS = 1, APPENDER_OK = 0, APPENDER_AGAIN = -1, APPENDER_FAILED = -2, APPENDER_NO_MEMORY = -3, APPENDER_FORKED = -4, APPENDER_ERRNO = -100 };

typedef struct appender appender;

typedef struct {
    uint64_t number;    /* of the last batch that was put */
    uint64_t attempted; /* handed to the operating system, or about to be: no other is written in part */
    uint64_t written;   /* handed to the operating system, whole */
    uint64_t durable;   /* on disk, of the files since `appender_restart` */
    uint64_t lsn, written_lsn, durable_lsn; /* the last LSNs of these */
    uint64_t syncs;
    double sync_seconds; /* how long one takes, lately */
    size_t queued; /* bytes */
    int fd;        /* its own */
    int failed;    /* the errno that has stopped it for good; 0: none */
} appender_state;

enum { APPENDER_BUCKETS = 20 };

/* How long each sync took: see durations.py. */
typedef struct {
    uint64_t counts[APPENDER_BUCKETS];
    double seconds;
} appender_durations;

extern double appender_bounds[APPENDER_BUCKETS - 1]; /* set once, before the first sync */

/* The system calls. Each returns what the call returns, or a negative errno. Tests put others here. */
typedef struct {
    ssize_t (*write)(int fd, const void *data, size_t size, off_t offset);
    int (*sync)(int fd);
} appender_calls;

extern const appender_calls appender_system_calls;
void appender_use(const appender_calls *calls); /* all of the process's, from now on */

appender *appender_new(void); /* NULL: no memory */
void appender_release(appender *log);
/* Go on in this file, from this offset on, by a descriptor of its own, which nobody else closes. AGAIN: after so many
   seconds the one before is still in use. Nothing is queued. -1: in none. APPENDER_ERRNO - errno: there is no descriptor. */
int appender_segment(appender *log, int fd, uint64_t offset, double seconds);
/* Begin with batch 1, behind this LSN, up to which all is on disk. */
void appender_restart(appender *log, uint64_t lsn);
/* Queue the next framed batch, which ends with this LSN. `sync`: somebody will wait for the disk. */
int appender_put(appender *log, const void *data, size_t size, uint64_t lsn, int sync);
/* Write what is queued up to this batch, without a sync. AGAIN: another thread is writing, and `seconds` are over. */
int appender_write(appender *log, uint64_t number, double seconds);
/* Wait until all up to this batch is on disk. AGAIN: `seconds` are over. PASS: the same as OK, but call `appender_pass`
   once you have what you need to go on: others wait who are to go on after you. */
int appender_wait(appender *log, uint64_t number, double seconds);
void appender_pass(appender *log);
/* Write nothing more, for good: as after an error. `attempted` stays as it is from then on. */
void appender_stop(appender *log);
/* See that what is queued is synced though nobody waits. */
void appender_kick(appender *log);
appender_state appender_look(appender *log);
appender_durations appender_took(appender *log);
uint64_t appender_written(appender *log);
uint64_t appender_durable(appender *log);
uint64_t appender_durable_lsn(appender *log);
#endif
