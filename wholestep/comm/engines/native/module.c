/* The Python names of the engine. Stable ABI, no header of torch: tensors come as addresses.
 *
 * A failed collective gives (status, culprit rank, our descriptor, the other's descriptor, whether they are of an earlier
 * collective); native_codes.py words it. */
#define _GNU_SOURCE
#include "python.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;

static u64 number(PyObject *o) { return PyLong_AsUnsignedLongLongMask(o); }
static void *address(PyObject *o) { return (void *)(uintptr_t)number(o); }
static int wrong(Py_ssize_t got, Py_ssize_t want) {
    if (got == want) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments given, %zd required", got, want);
    return 1;
}
static PyObject *os_error(int code) {
    errno = code;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *py_group_bytes(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return wrong(n, 1) ? NULL : PyLong_FromSize_t(group_bytes((int)number(a[0])));
}

/* attach(fd, rank, size) -> handle. The file has group_bytes(size) bytes; every rank attaches its own descriptor. */
static PyObject *py_attach(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 3)) return NULL;
    int fd = (int)number(a[0]), rank = (int)number(a[1]), size = (int)number(a[2]);
    size_t length = group_bytes(size), rings = p2p_bytes(size);
    int full = segment_fill(fd, 0, length - rings);
    if (full) return os_error(full);
    char *base = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return os_error(errno);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    group_t *g = calloc(1, sizeof *g);
    if (!g || fcntl(fd, F_SETLK, &lock)) {
        int code = errno;
        munmap(base, length);
        free(g);
        return os_error(code);
    }
    g->rank = rank, g->size = size, g->fd = fd, g->base = base, g->length = length;
    g->ctl = (ctl_t *)(base + LINE);
    g->slots = (char *)(g->ctl + size);
    g->depth = ring_depth(size), g->ahead = g->depth / 2, g->chunk = ring_chunk(size), g->slot = ring_slot(size);
    g->rings = g->slots + g->depth * (size_t)size * g->slot;
    cores_note(g);
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->p2p_lock, NULL);
    pthread_cond_init(&g->wake, NULL);
    for (size_t at = 0; at < g->depth * g->slot; at += 4096) g->slots[g->depth * (size_t)rank * g->slot + at] = 0;
    atomic_store(&g->ctl[rank].pid, (uint32_t)getpid());
    return PyLong_FromVoidPtr(g);
}

/* ready(handle, meeting): every rank has attached. meeting: each collective is compared before anyone goes on */
static PyObject *py_ready(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 2)) return NULL;
    group_t *g = address(a[0]);
    g->meeting = (int)number(a[1]);
    g->budget = g->spins = cores_suffice(g) ? spins_of_a_wait() : 0; /* else a spin would keep another from running */
    Py_RETURN_NONE;
}

/* settle(handle, seconds) -> None, or what went wrong in collectives that this rank went on from */
static PyObject *py_settle(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 2)) return NULL;
    group_t *g = address(a[0]);
    work_t j = {.timeout = PyFloat_AsDouble(a[1])};
    int status;
    GROUP_BEGIN(g)
    status = group_settle(g, &j);
    GROUP_END(g)
    return outcome(status, &j);
}

static PyObject *py_stop(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 1)) return NULL;
    group_t *g = address(a[0]);
    plans_forget();
    int quiet;
    Py_BEGIN_ALLOW_THREADS
    quiet = group_stop(g);
    Py_END_ALLOW_THREADS
    if (!quiet) Py_RETURN_NONE; /* a thread is still in it: left in place */
    munmap(g->base, g->length);
    close(g->fd);
    free(g);
    Py_RETURN_NONE;
}

/* forget_plans(): from here on no call is like an earlier one */
static PyObject *py_forget_plans(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self, (void)a;
    if (wrong(n, 0)) return NULL;
    plans_forget();
    Py_RETURN_NONE;
}

/* after_fork(): in the child, where other threads' locks stay locked for ever */
static PyObject *py_after_fork(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self, (void)a;
    if (wrong(n, 0)) return NULL;
    segments_unlock();
    plans_forget();
    Py_RETURN_NONE;
}

/* allocate(fd, length, id) -> address of the file's memory, known to collectives under `id` */
static PyObject *py_allocate(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 3)) return NULL;
    int fd = (int)number(a[0]);
    size_t length = (size_t)number(a[1]);
    int full = segment_fill(fd, 0, length);
    if (full) return os_error(full);
    void *base = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) return os_error(errno);
    if (segment_register(base, length, (uint32_t)number(a[2]), fd)) {
        munmap(base, length);
        return PyErr_NoMemory();
    }
    return PyLong_FromVoidPtr(base);
}

static PyObject *py_release(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 3)) return NULL;
    segment_forget((uint32_t)number(a[2]));
    munmap(address(a[0]), (size_t)number(a[1]));
    Py_RETURN_NONE;
}

PyObject *outcome(int status, const work_t *j) {
    if (status == OK) Py_RETURN_NONE;
    int late = status == E_MISMATCH && j->late;
    return Py_BuildValue("iiy#y#i", status, j->culprit, (const char *)(late ? &j->ours : &j->d),
                         (Py_ssize_t)DESC_COMPARED, (const char *)&j->theirs, (Py_ssize_t)DESC_COMPARED, late);
}

static uint64_t *array(PyObject *o, int *bad) {
    if (o == Py_None) return NULL;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(o, &bytes, &length)) return *bad = 1, NULL;
    uint64_t *copy = malloc((size_t)length + 1);
    if (copy) memcpy(copy, bytes, (size_t)length);
    else *bad = 1;
    return copy;
}

void work_free(work_t *j) {
    free(j->ins), free(j->outs), free(j->in_sizes), free(j->out_sizes);
    free(j);
}

/* A work or a message under way as Python holds it: freed with its last holder, since several threads may wait for it.
 * Holders keep it until it has ended or the group has. */
static void drop_job(PyObject *ticket) { work_free(PyCapsule_GetPointer(ticket, "work")); }
static void drop_message(PyObject *ticket) { free(PyCapsule_GetPointer(ticket, "message")); }
PyObject *ticket_of(work_t *j) { return PyCapsule_New(j, "work", drop_job); }

/* run(handle, op, dtype, red, root, bytes, shape, in, out, in_stride, out_stride, elem, timeout_s, async,
 *     ins, outs, in_sizes, out_sizes) -> None, a failure, or a ticket for finish() */
static PyObject *py_run(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 18)) return NULL;
    group_t *g = address(a[0]);
    int async = (int)number(a[13]), status, bad = 0;
    work_t *j = calloc(1, sizeof *j);
    if (!j) return PyErr_NoMemory();
    j->d.op = (uint8_t)number(a[1]), j->d.dtype = (uint8_t)number(a[2]), j->d.red = (uint8_t)number(a[3]);
    j->d.root = (uint32_t)number(a[4]), j->d.bytes = number(a[5]), j->d.shape = number(a[6]);
    j->in = address(a[7]), j->out = address(a[8]);
    j->in_stride = (size_t)number(a[9]), j->out_stride = (size_t)number(a[10]), j->elem = (size_t)number(a[11]);
    j->timeout = PyFloat_AsDouble(a[12]);
    j->ins = array(a[14], &bad), j->outs = array(a[15], &bad);
    j->in_sizes = array(a[16], &bad), j->out_sizes = array(a[17], &bad);
    if (bad || PyErr_Occurred()) {
        work_free(j);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    j->d.seq = ++g->seq;
    GROUP_BEGIN(g)
    status = work_submit(g, j, async);
    GROUP_END(g)
    if (status < 0) return ticket_of(j);
    PyObject *result = outcome(status, j);
    work_free(j);
    return result;
}

/* finish(handle, ticket, seconds) -> None, a failure, or False when the seconds ran out (the ticket stays good) */
static PyObject *py_finish(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 3)) return NULL;
    group_t *g = address(a[0]);
    work_t *j = PyCapsule_GetPointer(a[1], "work");
    if (!j) return NULL;
    double seconds = PyFloat_AsDouble(a[2]);
    int status;
    GROUP_BEGIN(g)
    status = work_finish(g, j, seconds);
    GROUP_END(g)
    if (status < 0) Py_RETURN_FALSE;
    return outcome(status, j);
}

static PyObject *py_test(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    work_t *j = wrong(n, 2) ? NULL : PyCapsule_GetPointer(a[1], "work");
    return j ? PyBool_FromLong(work_test(address(a[0]), j)) : NULL;
}

/* p2p_start(handle, send, peer, tag, address, bytes) -> ticket */
static PyObject *py_p2p_start(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 6)) return NULL;
    group_t *g = address(a[0]);
    int send = (int)number(a[1]), peer = (int)number(a[2]), tag = (int)number(a[3]);
    char *data = address(a[4]);
    size_t bytes = (size_t)number(a[5]);
    message_t *m;
    GROUP_BEGIN(g)
    m = p2p_start(g, send, peer, tag, data, bytes, 0);
    GROUP_END(g)
    return m ? PyCapsule_New(m, "message", drop_message) : PyErr_NoMemory();
}

/* p2p_finish(handle, ticket, seconds) -> (status, peer, bytes that the message has) */
static PyObject *py_p2p_finish(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 3)) return NULL;
    group_t *g = address(a[0]);
    message_t *m = PyCapsule_GetPointer(a[1], "message");
    if (!m) return NULL;
    double seconds = PyFloat_AsDouble(a[2]);
    int status, peer = -1;
    size_t got = 0;
    GROUP_BEGIN(g)
    status = p2p_finish(g, m, seconds, &peer, &got);
    GROUP_END(g)
    return Py_BuildValue("iiK", status, peer, (u64)got);
}

static PyObject *py_p2p_test(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    message_t *m = wrong(n, 2) ? NULL : PyCapsule_GetPointer(a[1], "message");
    return m ? PyBool_FromLong(p2p_test(address(a[0]), m)) : NULL;
}

/* alive(handle, rank) -> bool */
static PyObject *py_alive(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return wrong(n, 2) ? NULL : PyBool_FromLong(rank_alive(address(a[0]), (int)number(a[1])));
}

/* abort(handle, reason): this rank cannot go on; the group is broken on all ranks */
static PyObject *py_abort(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    char *reason;
    Py_ssize_t length;
    if (wrong(n, 2) || PyBytes_AsStringAndSize(a[1], &reason, &length)) return NULL;
    round_abort(address(a[0]), reason, (size_t)length);
    Py_RETURN_NONE;
}

/* reason(handle, rank) -> why it cannot go on; empty while it can */
static PyObject *py_reason(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 2)) return NULL;
    return PyBytes_FromString(((group_t *)address(a[0]))->ctl[number(a[1])].reason);
}

/* sequence(handle) -> collectives started */
static PyObject *py_sequence(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    return wrong(n, 1) ? NULL : PyLong_FromUnsignedLongLong(((group_t *)address(a[0]))->seq);
}

/* repeat(handle, address, count of float32, times) -> seconds for one all-reduce, called from C */
static PyObject *py_repeat(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (wrong(n, 4)) return NULL;
    group_t *g = address(a[0]);
    u64 times = number(a[3]);
    double took = 0;
    int status = OK;
    Py_BEGIN_ALLOW_THREADS
    double began = now();
    for (u64 i = 0; i < times && !status; i++) {
        work_t j = {.in = address(a[1]), .out = address(a[1]), .elem = 4, .timeout = 60};
        j.d.op = OP_ALL_REDUCE, j.d.dtype = T_F32, j.d.red = RED_MAX, j.d.bytes = 4 * number(a[2]), j.d.seq = ++g->seq;
        status = work_submit(g, &j, 0);
    }
    took = (now() - began) / (double)(times ? times : 1);
    Py_END_ALLOW_THREADS
    if (status) return PyErr_Format(PyExc_RuntimeError, "all-reduce failed with status %d", status);
    return PyFloat_FromDouble(took);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {METHOD(group_bytes), METHOD(attach),    METHOD(stop),       METHOD(allocate),
                                METHOD(release),     METHOD(run),       METHOD(finish),     METHOD(test),
                                METHOD(p2p_start),   METHOD(p2p_finish), METHOD(p2p_test),  METHOD(alive),
                                METHOD(repeat),      METHOD(sequence),   METHOD(quick_setup), METHOD(quick_pause),
                                METHOD(quick_profiler), METHOD(copy_small),
                                METHOD(learn),       METHOD(quicken),    METHOD(number),     METHOD(flights),
                                METHOD(abort),       METHOD(reason),     METHOD(ready),      METHOD(settle),
                                METHOD(forget_plans), METHOD(after_fork),
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "The shared-memory engine.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
