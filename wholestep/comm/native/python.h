/* What the two files that speak Python share. Stable ABI, no header of torch. */
#ifndef WHOLESTEP_PYTHON_H
#define WHOLESTEP_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "shm.h"

PyObject *outcome(int status, const job_t *j);
void job_free(job_t *j);
void plans_forget(void);
PyObject *py_quick_setup(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_quick_pause(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_learn(PyObject *self, PyObject *const *a, Py_ssize_t n);
PyObject *py_again(PyObject *self, PyObject *const *a, Py_ssize_t n);

#endif
