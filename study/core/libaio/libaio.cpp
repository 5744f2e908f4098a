/* What libaio.h declares. */
#include "libaio.h"

#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As in linux/aio_abi.h. */
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && sizeof(long) == 8, "64-bit, little-endian systems only");
static_assert(sizeof(struct iocb) == 64 && sizeof(struct io_event) == 32, "the kernel's sizes");
static_assert(offsetof(struct iocb, aio_lio_opcode) == 16 && offsetof(struct iocb, u.c.buf) == 24 &&
                  offsetof(struct iocb, u.c.offset) == 40 && offsetof(struct iocb, u.c.resfd) == 60,
              "the kernel's layout");

static int result(long value) { return value == -1 ? -errno : (int)value; }

int io_setup(int requests, io_context_t* context) { return result(syscall(SYS_io_setup, requests, context)); }

int io_destroy(io_context_t context) { return result(syscall(SYS_io_destroy, context)); }

int io_submit(io_context_t context, long count, struct iocb* requests[])
{
    return result(syscall(SYS_io_submit, context, count, requests));
}

int io_cancel(io_context_t context, struct iocb* request, struct io_event* event)
{
    return result(syscall(SYS_io_cancel, context, request, event));
}

int io_getevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout)
{
    return result(syscall(SYS_io_getevents, context, least, most, events, timeout));
}

int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* timeout,
                  sigset_t* mask)
{
    struct {
        sigset_t* mask;
        size_t bytes;
    } signals = {mask, 8}; /* the kernel's set has 64 signals */
    return result(syscall(SYS_io_pgetevents, context, least, most, events, timeout, mask ? &signals : NULL));
}

int io_queue_init(int requests, io_context_t* context)
{
    *context = NULL;
    return requests > 0 ? io_setup(requests, context) : -EINVAL;
}

int io_queue_release(io_context_t context) { return io_destroy(context); }
