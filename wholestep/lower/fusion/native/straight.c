/* Calls in a row with no Python between them: products of matrices by the BLAS within torch, sums over rows, chains. */
#include "chain.h"

#include <stdlib.h>
#include <string.h>

#define COLUMNS 64 /* columns whose partial sums stay in registers and the first cache */
#define LEVELS 4

typedef void sgemm_t(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha,
                     const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
                     const int *ldc);

enum { CHAIN, PRODUCT, ROWS, SUM };

/* PRODUCT: r (m x n, by columns) = a b, or r + a b where it adds; ROWS: each of m rows of r is a, n wide; SUM: r is the
 * sum of m rows of a, n wide. */
typedef struct {
    int64_t kind, r, a, b, m, n, k, ldr, lda, ldb, flipped_a, flipped_b, adds;
    const chain_t *chain;
} line_t;
#define NUMBERS 13
typedef struct {
    Py_ssize_t count;
    sgemm_t *sgemm;
    PyObject *kept;
    line_t *line;
} straight_t;

static void product(sgemm_t *sgemm, const line_t *l) {
    const int m = (int)l->m, n = (int)l->n, k = (int)l->k, lda = (int)l->lda, ldb = (int)l->ldb, ldr = (int)l->ldr;
    const float one = 1, beta = (float)l->adds;
    sgemm(l->flipped_a ? "t" : "n", l->flipped_b ? "t" : "n", &m, &n, &k, &one, (float *)(uintptr_t)l->a, &lda,
          (float *)(uintptr_t)l->b, &ldb, &beta, (float *)(uintptr_t)l->r, &ldr);
}

/* A cascade, as torch's sums are: 2^power rows are added up, such sums again, and so on through four levels. */
CLONES static void sum_block(Py_ssize_t n, float *r, const float *a, int64_t rows, int64_t width, int power) {
    float level[LEVELS][COLUMNS] = {{0}};
    int64_t row = 0;
    while (row + (1 << power) <= rows) {
        for (int64_t end = row + (1 << power); row < end; row++)
            for (Py_ssize_t i = 0; i < n; i++) level[0][i] += a[row * width + i];
        for (int j = 1; j < LEVELS; j++) {
            for (Py_ssize_t i = 0; i < n; i++) level[j][i] += level[j - 1][i], level[j - 1][i] = 0;
            if (row >> j * power & ((1 << power) - 1)) break;
        }
    }
    for (; row < rows; row++)
        for (Py_ssize_t i = 0; i < n; i++) level[0][i] += a[row * width + i];
    for (Py_ssize_t i = 0; i < n; i++) r[i] = level[0][i] + level[1][i] + level[2][i] + level[3][i];
}

static void sum(const line_t *l) {
    int bits = 0;
    while ((int64_t)1 << bits < l->m) bits++;
    const int power = bits / LEVELS > 4 ? bits / LEVELS : 4;
    for (int64_t from = 0; from < l->n; from += COLUMNS)
        sum_block(l->n - from < COLUMNS ? l->n - from : COLUMNS, (float *)(uintptr_t)l->r + from,
                  (const float *)(uintptr_t)l->a + from, l->m, l->n, power);
}

static void run(const straight_t *s) {
    for (const line_t *l = s->line; l < s->line + s->count; l++) switch (l->kind) {
        case CHAIN: run_chain(l->chain); break;
        case PRODUCT: product(s->sgemm, l); break;
        case SUM: sum(l); break;
        default: {
            const size_t bytes = (size_t)l->n * sizeof(float);
            for (int64_t i = 0; i < l->m; i++) memcpy((char *)(uintptr_t)l->r + (size_t)i * bytes, (char *)(uintptr_t)l->a, bytes);
        }
        }
}

static void forget(PyObject *capsule) {
    straight_t *s = PyCapsule_GetPointer(capsule, "straight");
    if (s) Py_XDECREF(s->kept), free(s->line), free(s);
}

/* straight(address of sgemm_, rows) -> calls. A row is a chain, or the numbers of a `line_t`. */
PyObject *straight(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long sgemm;
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "KO!", &sgemm, &PyList_Type, &rows)) return NULL;
    straight_t *s = calloc(1, sizeof *s);
    PyObject *made = s ? PyCapsule_New(s, "straight", forget) : PyErr_NoMemory();
    if (!made) return free(s), NULL;
    s->sgemm = (sgemm_t *)(uintptr_t)sgemm, s->kept = PyList_AsTuple(rows), s->count = PyList_Size(rows);
    s->line = calloc((size_t)s->count + 1, sizeof *s->line);
    if (!s->line) PyErr_NoMemory();
    for (Py_ssize_t i = 0; s->kept && s->line && i < s->count && !PyErr_Occurred(); i++) {
        PyObject *row = PyTuple_GetItem(s->kept, i);
        line_t *l = &s->line[i];
        if (!PyTuple_Check(row)) {
            l->chain = PyCapsule_GetPointer(row, "chain");
            if (l->chain && l->chain->given + l->chain->in_parts) PyErr_SetString(PyExc_ValueError, "a chain that asks for addresses");
            continue;
        }
        for (Py_ssize_t j = 0; j < NUMBERS && j < PyTuple_Size(row); j++)
            (&l->kind)[j] = (int64_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(row, j));
        if (l->kind <= CHAIN || l->kind > SUM || (l->kind == PRODUCT && !sgemm)) PyErr_SetString(PyExc_ValueError, "no such call");
    }
    if (PyErr_Occurred()) Py_CLEAR(made);
    return made;
}

/* run_straight(calls) */
PyObject *run_straight(PyObject *self, PyObject *calls) {
    (void)self;
    const straight_t *s = PyCapsule_GetPointer(calls, "straight");
    if (!s) return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(s);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
