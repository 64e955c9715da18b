/* A chain of elementwise operators on float32, run block by block: each block passes through all of them in the cache.
 *
 * Stable ABI, no header of torch: memory comes as addresses. Each kernel rounds after every operation, or fuses a product
 * with a sum where its name says so; which of the two torch does is found out by trial (`chains.py`). */
#include "chain.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 256        /* elements: operands and what is asked for ahead stay in the first cache; 512 took 1.3 times as long */
#define ALONE_FROM 65536 /* elements from which other Python threads may run meanwhile */
#define GRAIN 32768      /* elements for each of torch's threads, at least: what torch gives its own kernels */

/* Operands may be the very same memory as the result, never shifted against it. */
#define EACH _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < n; i++)

typedef void kernel_t(Py_ssize_t n, float *r, const float *a, const float *b, const float *c, float s, float t);

#define KERNEL(NAME, EXPRESSION)                                                                                       \
    CLONES static void NAME(Py_ssize_t n, float *r, const float *a, const float *b, const float *c, float s,           \
                            float t) {                                                                                 \
        (void)a, (void)b, (void)c, (void)s, (void)t;                                                                   \
        EACH r[i] = EXPRESSION;                                                                                        \
    }

KERNEL(add, a[i] + b[i])
KERNEL(add_number, a[i] + s)
KERNEL(sub, a[i] - b[i])
KERNEL(sub_number, a[i] - s)
KERNEL(mul, a[i] * b[i])
KERNEL(mul_number, a[i] * s)
KERNEL(div_, a[i] / b[i])
KERNEL(div_number, a[i] / s)
KERNEL(axpy, a[i] + s * b[i])
KERNEL(axpy_fused, fmaf(s, b[i], a[i]))
KERNEL(negate, -a[i])
KERNEL(absolute, fabsf(a[i]))
KERNEL(root, sqrtf(a[i]))
KERNEL(largest, a[i] != a[i] || a[i] > b[i] ? a[i] : b[i])
KERNEL(least, a[i] != a[i] || a[i] < b[i] ? a[i] : b[i])
KERNEL(relu, a[i] < 0 ? 0 : a[i])
KERNEL(threshold_backward, b[i] <= s ? 0 : a[i])
KERNEL(addcmul, a[i] + s * b[i] * c[i])
KERNEL(addcmul_fused, fmaf(s * b[i], c[i], a[i]))
KERNEL(addcdiv, a[i] + s * b[i] / c[i])
KERNEL(lerp_low, a[i] + s * (b[i] - a[i]))
KERNEL(lerp_high, b[i] - (b[i] - a[i]) * (1.0f - s))
KERNEL(lerp_low_fused, fmaf(s, b[i] - a[i], a[i]))
KERNEL(lerp_high_fused, fmaf(s - 1.0f, b[i] - a[i], b[i]))

/* Two operators in a row, the first of them on a and the number t, each rounding as it does alone: half the passes. */
KERNEL(mul_add, a[i] * t + b[i])
KERNEL(mul_axpy, a[i] * t + s * b[i])
KERNEL(mul_axpy_fused, fmaf(s, b[i], a[i] * t))
KERNEL(mul_addcmul, a[i] * t + s * b[i] * c[i])
KERNEL(mul_addcmul_fused, fmaf(s * b[i], c[i], a[i] * t))
KERNEL(mul_addcdiv, a[i] * t + s * b[i] / c[i])
KERNEL(div_add_number, a[i] / t + s)

CLONES static void lerp(Py_ssize_t n, float *r, const float *a, const float *b, const float *c, float s, float t) {
    (fabsf(s) < 0.5f ? lerp_low : lerp_high)(n, r, a, b, c, s, t);
}
CLONES static void lerp_fused(Py_ssize_t n, float *r, const float *a, const float *b, const float *c, float s, float t) {
    (fabsf(s) < 0.5f ? lerp_low_fused : lerp_high_fused)(n, r, a, b, c, s, t);
}

/* MKL's square root, which is torch's where torch was built with MKL: it does not round correctly, so its bits are had by
 * calling it alone. A zero takes it five times as long as a number, and is its own root. */
typedef void mkl_t(int n, const float *a, float *r, int64_t mode);
static mkl_t *mkl_sqrt;
static int (*mkl_threads)(int);
static int64_t mkl_mode;

/* On this thread alone: to ask for the threads of one block takes MKL three times as long as its roots. */
static void roots(Py_ssize_t n, const float *a, float *r) {
    int before = mkl_threads(1);
    mkl_sqrt((int)n, a, r, mkl_mode);
    mkl_threads(before);
}

CLONES static int zeros(Py_ssize_t n, const float *a) {
    int found = 0;
    EACH found += a[i] == 0;
    return found;
}

CLONES static void shield(Py_ssize_t n, float *r, const float *a) { EACH r[i] = a[i] == 0 ? 1.0f : a[i]; }

CLONES static void keep_zeros(Py_ssize_t n, float *r, const float *a, const float *root) {
    EACH r[i] = a[i] == 0 ? a[i] : root[i];
}

static void root_mkl(Py_ssize_t n, float *r, const float *a, const float *b, const float *c, float s, float t) {
    (void)b, (void)c, (void)s, (void)t;
    int found = zeros(n, a);
    if (!found) {
        roots(n, a, r);
    } else if (found == n) {
        memmove(r, a, (size_t)n * sizeof *r);
    } else {
        float shielded[BLOCK];
        shield(n, shielded, a);
        roots(n, shielded, shielded);
        keep_zeros(n, r, a, shielded);
    }
}

static const struct {
    const char *name;
    kernel_t *run;
} KERNELS[] = {
    {"add", add}, {"add_number", add_number}, {"sub", sub}, {"sub_number", sub_number}, {"mul", mul},
    {"mul_number", mul_number}, {"div", div_}, {"div_number", div_number}, {"axpy", axpy}, {"axpy_fused", axpy_fused},
    {"neg", negate}, {"abs", absolute}, {"sqrt", root}, {"sqrt_mkl", root_mkl}, {"maximum", largest}, {"minimum", least},
    {"relu", relu}, {"threshold_backward", threshold_backward},
    {"addcmul", addcmul}, {"addcmul_fused", addcmul_fused}, {"addcdiv", addcdiv}, {"lerp", lerp},
    {"lerp_fused", lerp_fused}, {"mul_add", mul_add}, {"mul_axpy", mul_axpy}, {"mul_axpy_fused", mul_axpy_fused},
    {"mul_addcmul", mul_addcmul}, {"mul_addcmul_fused", mul_addcmul_fused}, {"mul_addcdiv", mul_addcdiv},
    {"div_add_number", div_add_number},
};
#define KERNEL_COUNT (Py_ssize_t)(sizeof KERNELS / sizeof *KERNELS)

enum { MEMORY, SCRATCH, GIVEN, PART }; /* an address; a block of the chain's own; an address that each call gives, for
                                          the whole, and for the elements on which the call works */

typedef struct {
    const chain_t *chain;
    const int64_t *given;
    Py_ssize_t begin, first, end; /* where the part begins; the elements to work on */
    int64_t part;
    float *scratch;
} call_t;

static float *at(const call_t *call, int64_t index, Py_ssize_t from) {
    if (index < 0) return NULL;
    const place_t *p = &call->chain->place[index];
    if (p->kind == SCRATCH) return call->scratch + p->value * BLOCK;
    if (p->kind == PART) return (float *)(uintptr_t)call->part + (from - call->begin);
    return (float *)(uintptr_t)(p->kind == GIVEN ? call->given[p->value] : p->value) + from;
}

/* Asks for the next block of what a step is the first to touch: without it, the chain waits for memory at each block. */
static void look_ahead(const call_t *call, const step_t *s, Py_ssize_t from) {
    Py_ssize_t next = from + BLOCK, left = call->chain->count - next, n = left < BLOCK ? left : BLOCK;
    for (int i = 0; i < 4; i++) {
        if (!(s->touches >> i & 1)) continue;
        const float *there = at(call, (&s->result)[i], next);
        for (Py_ssize_t j = 0; j < n; j += 16) __builtin_prefetch(there + j, 1, 3);
    }
}

static void work(call_t *call) {
    const chain_t *c = call->chain;
    float scratch[(c->scratch + 1) * BLOCK] __attribute__((aligned(64)));
    call->scratch = scratch;
    for (Py_ssize_t from = call->first; from < call->end; from += BLOCK) {
        Py_ssize_t n = call->end - from < BLOCK ? call->end - from : BLOCK;
        for (const step_t *s = c->step; s < c->step + c->steps; s++) {
            if (s->touches) look_ahead(call, s, from);
            const float *number = at(call, s->number, 0), *other = at(call, s->other, 0);
            KERNELS[s->kernel].run(n, at(call, s->result, from), at(call, s->a, from), at(call, s->b, from),
                                   at(call, s->c, from), number ? *number : 0, other ? *other : 0);
        }
    }
}

/* torch's own threads, by the OpenMP that it has loaded: a second one would have threads of its own beside them. */
static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)(void), (*count)(void), (*most)(void);
} openmp;

/* Whole blocks for each thread: the bits of one thread, whose blocks they are. */
static void work_on_share(void *data) {
    call_t call = *(call_t *)data;
    Py_ssize_t begin = call.first, end = call.end, count = openmp.count();
    Py_ssize_t share = ((end - begin + count - 1) / count + BLOCK - 1) / BLOCK * BLOCK;
    call.first = begin + share * openmp.number();
    call.end = end - call.first < share ? end : call.first + share;
    if (call.first < end) work(&call);
}

static void work_together(call_t *call) {
    Py_ssize_t most = openmp.parallel ? openmp.most() : 1, grains = (call->end - call->first + GRAIN - 1) / GRAIN;
    if (most > grains) most = grains;
    if (most > 1)
        openmp.parallel(work_on_share, call, (unsigned)most, 0);
    else
        work(call);
}

void run_chain(const chain_t *c) {
    call_t whole = {.chain = c, .end = c->count};
    work(&whole);
}

static void forget(PyObject *capsule) {
    chain_t *c = PyCapsule_GetPointer(capsule, "chain");
    if (c) free(c->place), free(c->step), free(c);
}

static int read_rows(PyObject *rows, int64_t **into, Py_ssize_t *count, Py_ssize_t width) {
    PyObject *list = PySequence_List(rows);
    *count = list ? PyList_Size(list) : -1;
    *into = *count < 0 ? NULL : calloc((size_t)*count * (size_t)width + 1, sizeof **into);
    for (Py_ssize_t i = 0; *into && i < *count; i++) {
        PyObject *row = PySequence_Tuple(PyList_GetItem(list, i));
        if (row && PyTuple_Size(row) != width) PyErr_Format(PyExc_ValueError, "a row of %zd numbers is required", width);
        for (Py_ssize_t j = 0; row && j < width && !PyErr_Occurred(); j++)
            (*into)[i * width + j] = (int64_t)PyLong_AsLongLong(PyTuple_GetItem(row, j));
        Py_XDECREF(row);
        if (PyErr_Occurred()) break;
    }
    Py_XDECREF(list);
    if (!*into && !PyErr_Occurred()) PyErr_NoMemory();
    return PyErr_Occurred() ? -1 : 0;
}

/* chain(count, places, steps) -> chain. A place is (kind, value), a step (kernel, result, a, b, c, number, other, touches). */
static PyObject *py_chain(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *places, *steps;
    chain_t *c = calloc(1, sizeof *c);
    if (!c) return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "nOO", &c->count, &places, &steps) ||
        read_rows(places, (int64_t **)&c->place, &c->places, 2) || read_rows(steps, (int64_t **)&c->step, &c->steps, 8))
        goto wrong;
    for (place_t *p = c->place; p < c->place + c->places; p++) {
        if (p->kind == SCRATCH && p->value >= c->scratch) c->scratch = p->value + 1;
        if (p->kind == GIVEN && p->value >= c->given) c->given = p->value + 1;
        if (p->kind == PART) c->in_parts = 1;
        if (p->kind < MEMORY || p->kind > PART || p->value < 0) PyErr_SetString(PyExc_ValueError, "no such place");
    }
    if (c->scratch > 256) PyErr_SetString(PyExc_ValueError, "more than 256 blocks of scratch");
    for (step_t *s = c->step; s < c->step + c->steps; s++) {
        if (s->kernel < 0 || s->kernel >= KERNEL_COUNT || (KERNELS[s->kernel].run == root_mkl && !mkl_sqrt))
            PyErr_SetString(PyExc_ValueError, "no such kernel");
        for (int64_t *p = &s->result; p <= &s->other; p++)
            if (*p < (p <= &s->a ? 0 : -1) || *p >= c->places) PyErr_SetString(PyExc_ValueError, "no such operand");
    }
    if (!PyErr_Occurred()) return PyCapsule_New(c, "chain", forget);
wrong:
    free(c->place), free(c->step), free(c);
    return NULL;
}

/* One call: of the whole, or of some elements, whose place and number come before the addresses. */
static PyObject *call(PyObject *const *args, Py_ssize_t n, int in_parts) {
    chain_t *c = n < 1 ? NULL : PyCapsule_GetPointer(args[0], "chain");
    Py_ssize_t before = in_parts ? 4 : 1;
    if (!c || n - before != c->given || c->in_parts != in_parts) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a chain and the addresses it asks for are required");
        return NULL;
    }
    int64_t numbers[n];
    for (Py_ssize_t i = 1; i < n; i++) numbers[i] = (int64_t)PyLong_AsUnsignedLongLongMask(args[i]);
    if (PyErr_Occurred()) return NULL;
    call_t made = {.chain = c, .given = numbers + before, .end = c->count};
    if (in_parts) {
        made.begin = made.first = numbers[1], made.end = numbers[1] + numbers[2], made.part = numbers[3];
        if (made.first < 0 || numbers[2] < 0 || numbers[2] > c->count - made.first) {
            PyErr_SetString(PyExc_ValueError, "a part that the chain does not have");
            return NULL;
        }
    }
    if (made.end - made.first < ALONE_FROM) {
        work_together(&made);
    } else {
        Py_BEGIN_ALLOW_THREADS
        work_together(&made);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* run(chain, *addresses) */
static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) { return (void)self, call(args, n, 0); }

/* run_part(chain, first element, elements, address of the part, *addresses) */
static PyObject *py_run_part(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return (void)self, call(args, n, 1);
}

/* use_mkl(address of vmsSqrt, of MKL_Set_Num_Threads_Local, mode) */
static PyObject *py_use_mkl(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long root, threads;
    long long mode;
    if (!PyArg_ParseTuple(args, "KKL", &root, &threads, &mode)) return NULL;
    mkl_sqrt = (mkl_t *)(uintptr_t)root, mkl_threads = (int (*)(int))(uintptr_t)threads, mkl_mode = mode;
    Py_RETURN_NONE;
}

/* use_openmp(addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads, omp_get_max_threads) */
static PyObject *py_use_openmp(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long at[4];
    if (!PyArg_ParseTuple(args, "KKKK", at, at + 1, at + 2, at + 3)) return NULL;
    openmp.number = (int (*)(void))(uintptr_t)at[1], openmp.count = (int (*)(void))(uintptr_t)at[2];
    openmp.most = (int (*)(void))(uintptr_t)at[3];
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)at[0];
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"use_openmp", py_use_openmp, METH_VARARGS, NULL},
    {"use_mkl", py_use_mkl, METH_VARARGS, NULL},
    {"chain", py_chain, METH_VARARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL, NULL},
    {"run_part", (PyCFunction)(void (*)(void))py_run_part, METH_FASTCALL, NULL},
    {"straight", straight, METH_VARARGS, NULL},
    {"run_straight", run_straight, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_chain", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__chain(void) {
    PyObject *module = PyModule_Create(&MODULE), *names = module ? PyDict_New() : NULL;
    for (Py_ssize_t i = 0; names && i < KERNEL_COUNT; i++) {
        PyObject *index = PyLong_FromSsize_t(i);
        if (!index || PyDict_SetItemString(names, KERNELS[i].name, index)) Py_CLEAR(names);
        Py_XDECREF(index);
    }
    if (!names || PyModule_AddObjectRef(module, "KERNELS", names)) Py_CLEAR(module);
    Py_XDECREF(names);
    return module;
}
