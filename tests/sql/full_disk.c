/* A disk without room for more, preloaded into a server (test_shared_full_disk.py): while the file that FULL_DISK names
   is there, no file grows whose path has what is written in it. What files have can be written over. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t text_of(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0) close(fd);
    if (got >= 0) text[got] = 0;
    return got;
}

static int is_full(int fd, off_t end) {
    struct stat now;
    char full[64], link[64], path[4096];
    const char *flag = getenv("FULL_DISK");
    int before = errno, found = 0;
    if (flag && !fstat(fd, &now) && S_ISREG(now.st_mode) && end > now.st_size && text_of(flag, full, sizeof full) > 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
        found = strstr(path, full) != NULL;
    }
    errno = found ? ENOSPC : before;
    return found;
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    return is_full(fd, lseek(fd, 0, SEEK_CUR) + (off_t)size) ? -1 : REAL(write)(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return is_full(fd, at + (off_t)size) ? -1 : REAL(pwrite)(fd, data, size, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    off_t end = at;
    for (int part = 0; part < count; part++) end += (off_t)parts[part].iov_len;
    return is_full(fd, end) ? -1 : REAL(pwritev)(fd, parts, count, at);
}

int posix_fallocate(int fd, off_t at, off_t size) {
    return is_full(fd, at + size) ? ENOSPC : REAL(posix_fallocate)(fd, at, size);
}
