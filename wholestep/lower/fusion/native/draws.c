/* Bernoulli draws of torch's CPU generator, many at once: the numbers that torch draws one by one, in its order.
 *
 * The generator is MT19937 (Matsumoto and Nishimura, 1998); a draw takes two of its words as 53 bits of a number between
 * 0 and 1. Stable ABI, no header of torch: memory comes as addresses, the state in the layout that `get_state` gives. */
#include "clones.h"

#include <math.h>

#define N 624
#define M 397
#define PIECE 1024 /* draws at once: their words stay in the first cache */

/* What `get_state` begins with. */
typedef struct {
    uint64_t seed;
    int32_t left, seeded; /* words until the next twist, and one */
    uint64_t next, state[N];
} legacy_t;

static inline uint32_t twisted(uint32_t u, uint32_t v) {
    return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ ((0u - (v & 1)) & 0x9908b0dfu);
}

/* A new word depends on one that is M further on, or N - M before: far more than a vector has. */
CLONES static void twist(uint32_t *s) {
    _Pragma("GCC ivdep") for (int i = 0; i < N - M; i++) s[i] = s[i + M] ^ twisted(s[i], s[i + 1]);
    _Pragma("GCC ivdep") for (int i = N - M; i < N - 1; i++) s[i] = s[i + M - N] ^ twisted(s[i], s[i + 1]);
    s[N - 1] = s[M - 1] ^ twisted(s[N - 1], s[0]);
}

CLONES static void temper(Py_ssize_t n, const uint32_t *s, uint32_t *r) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t y = s[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        r[i] = y ^ (y >> 18);
    }
}

/* Whether each number, of which 53 bits count, is below the limit. */
CLONES static void compare(Py_ssize_t n, const uint32_t *words, int64_t below, float *r) {
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t bits = (int64_t)(words[2 * i] & 0x1fffffu) << 32 | words[2 * i + 1];
        r[i] = bits < below ? 1.0f : 0.0f;
    }
}

/* bernoulli(address of floats, how many, p, address of the generator's state, which is moved on) */
static PyObject *py_bernoulli(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long out_at, state_at;
    Py_ssize_t count;
    double p;
    if (!PyArg_ParseTuple(args, "KndK", &out_at, &count, &p, &state_at)) return NULL;
    legacy_t *given = (legacy_t *)(uintptr_t)state_at;
    float *out = (float *)(uintptr_t)out_at;
    if (!(p >= 0 && p <= 1) || given->left < 1 || given->left > N || given->next + (uint64_t)given->left - 1 > N) {
        PyErr_SetString(PyExc_ValueError, "a probability and the state of a seeded CPU generator are required");
        return NULL;
    }
    uint32_t state[N], words[2 * PIECE];
    Py_ssize_t left = given->left - 1, next = (Py_ssize_t)given->next;
    int64_t below = (int64_t)ceil(ldexp(p, 53));
    for (int i = 0; i < N; i++) state[i] = (uint32_t)given->state[i];
    for (Py_ssize_t done = 0; done < count; done += PIECE) {
        Py_ssize_t n = count - done < PIECE ? count - done : PIECE;
        for (Py_ssize_t had = 0; had < 2 * n;) {
            if (!left) twist(state), left = N, next = 0;
            Py_ssize_t some = 2 * n - had < left ? 2 * n - had : left;
            temper(some, state + next, words + had);
            had += some, next += some, left -= some;
        }
        compare(n, words, below, out + done);
    }
    given->left = (int32_t)left + 1, given->next = (uint64_t)next;
    for (int i = 0; i < N; i++) given->state[i] = state[i];
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {{"bernoulli", py_bernoulli, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_draws", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__draws(void) { return PyModule_Create(&MODULE); }
