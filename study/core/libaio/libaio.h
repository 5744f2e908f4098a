/* The part of libaio's interface that DeepSpeed uses, over the kernel's system calls (see man 2 io_submit).
 * So no machine needs libaio: libaio.cpp beside this file is compiled as one more source. 64-bit, little-endian Linux. */
#ifndef LIBAIO_H
#define LIBAIO_H

#include <signal.h>
#include <string.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct io_context* io_context_t;

/* The kernel's layout, in linux/aio_abi.h. That header is not included here: it defines macros such as BLOCK_SIZE. */
struct iocb {
    void* data;
    unsigned int key;
    unsigned int aio_rw_flags;
    short aio_lio_opcode;
    short aio_reqprio;
    int aio_fildes;
    union {
        struct {
            void* buf;
            unsigned long nbytes;
            long long offset;
            long long reserved;
            unsigned int flags;
            unsigned int resfd;
        } c;
    } u;
};

struct io_event {
    void* data;
    struct iocb* obj;
    long res;
    long res2;
};

enum { IO_CMD_PREAD = 0, IO_CMD_PWRITE = 1 };

/* Each returns the kernel's result, or a negative errno. */
int io_setup(int requests, io_context_t* context);
int io_destroy(io_context_t context);
int io_submit(io_context_t context, long count, struct iocb* requests[]);
int io_cancel(io_context_t context, struct iocb* request, struct io_event* event);
int io_getevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout);
int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout,
                  sigset_t* mask);
int io_queue_init(int requests, io_context_t* context);
int io_queue_release(io_context_t context);

static inline void io_prep(struct iocb* request, short command, int file, void* buffer, size_t bytes,
                           long long offset)
{
    memset(request, 0, sizeof(*request));
    request->aio_fildes = file;
    request->aio_lio_opcode = command;
    request->u.c.buf = buffer;
    request->u.c.nbytes = bytes;
    request->u.c.offset = offset;
}

static inline void io_prep_pread(struct iocb* request, int file, void* buffer, size_t bytes, long long offset)
{
    io_prep(request, IO_CMD_PREAD, file, buffer, bytes, offset);
}

static inline void io_prep_pwrite(struct iocb* request, int file, void* buffer, size_t bytes, long long offset)
{
    io_prep(request, IO_CMD_PWRITE, file, buffer, bytes, offset);
}

#ifdef __cplusplus
}
#endif
#endif
