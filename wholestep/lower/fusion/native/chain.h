/* What chains and straight calls share. */
#pragma once
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef struct {
    int64_t kind, value;
} place_t;
typedef struct {
    int64_t kernel, result, a, b, c, number, other; /* places, -1 for none */
    int64_t touches;                                /* which of result, a, b, c is memory that no earlier step touched, as bits */
} step_t;
typedef struct {
    Py_ssize_t count, places, steps, scratch, given;
    int in_parts;
    place_t *place;
    step_t *step;
} chain_t;

/* Runs a chain that takes no addresses. */
void run_chain(const chain_t *c);

PyObject *straight(PyObject *self, PyObject *args);
PyObject *run_straight(PyObject *self, PyObject *calls);
