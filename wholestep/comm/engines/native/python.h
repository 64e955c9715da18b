/* What the files that speak Python share. Stable ABI, no header of torch. */
#ifndef WHOLESTEP_PYTHON_H
#define WHOLESTEP_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "shm.h"

#define DIMS 8
#define WORDS (5 + 2 * (3 + DIMS))

typedef struct { /* DLTensor */
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} view_t;

/* What a call gives for one of its sides: a tensor, or a list of tensors that are alike, one a rank. */
typedef struct {
    view_t view;          /* of the first */
    Py_ssize_t count;     /* of a list; ONE tensor; ABSENT */
    uint64_t at[MAX_RANKS];
} side_t;
enum { ONE = -1, ABSENT = -2 };

typedef struct {
    uint64_t word[WORDS];
    size_t words;
} plan_key_t;

typedef struct {
    plan_key_t key;
    PyObject *op, *group, *owner, *what; /* what was given; the group itself; what the flight recorder shows */
    group_t *g;                          /* NULL: an empty place */
    desc_t d;
    size_t in_stride, out_stride, elem;
    double timeout;
    uint64_t part; /* all_to_all: bytes for each rank */
} plan_t;

PyObject *outcome(int status, const work_t *j);
PyObject *ticket_of(work_t *j);
void work_free(work_t *j);

/* Around what a thread does in a group without the GIL: `group_stop` waits for it. */
#define GROUP_BEGIN(g) atomic_fetch_add(&(g)->inside, 1); Py_BEGIN_ALLOW_THREADS
#define GROUP_END(g) atomic_fetch_sub(&(g)->inside, 1); Py_END_ALLOW_THREADS

/* flight.c */
typedef struct flight flight_t;
void flights_setup(PyObject *ring, PyObject *started, PyObject *completed);
flight_t *flight_note(PyObject *what, uint64_t seq);
PyObject *flight_hand_over(flight_t *f);
void flight_end(PyObject *handed);
PyObject *py_number(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_flights(PyObject *self, PyObject *const *a, Py_ssize_t n);

/* plans.c: arguments are what, out, in, op, group, root */
const plan_t *plan_for(PyObject *const *a, side_t *out, side_t *in);
void plans_forget(void);
PyObject *py_quick_setup(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_copy_small(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_quick_pause(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_quick_profiler(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_learn(PyObject *self, PyObject *const *a, Py_ssize_t n);

/* cached_call.c */
PyObject *py_quicken(PyObject *self, PyObject *const *a, Py_ssize_t n);

#endif
