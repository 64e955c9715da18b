/* Methods of C, watched by their definitions: every call of one comes by here, bound, in a partial, by any name. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

/* Takes as many arguments as any convention passes; those that one does not pass are passed on unread. */
typedef PyObject *(*Method)(PyObject *, void *, void *, void *);

static struct {
    PyMethodDef *definition;
    Method original;
    PyObject *hook;
} watched[128];

static PyObject *first_argument(int flags, void *given, void *more) {
    if (flags & METH_O)
        return given;
    if (flags & METH_FASTCALL)
        return (Py_ssize_t)more > 0 ? *(PyObject **)given : Py_None;
    return flags & METH_VARARGS && PyTuple_Size(given) > 0 ? PyTuple_GetItem(given, 0) : Py_None;
}

static PyObject *enter(int at, PyObject *self, void *a, void *b, void *c) {
    PyObject *hook = watched[at].hook;
    if (hook != NULL) {
        Py_INCREF(hook);
        PyObject *first = first_argument(watched[at].definition->ml_flags, a, b);
        PyObject *answer = PyObject_CallFunctionObjArgs(hook, self, first, NULL);
        Py_DECREF(hook);
        if (answer == NULL)
            return NULL;
        Py_DECREF(answer);
    }
    return watched[at].original(self, a, b, c);
}

#define ONE(at) static PyObject *enter_##at(PyObject *self, void *a, void *b, void *c) { return enter(0x##at, self, a, b, c); }
#define EACH(x, of) \
    of(x##0) of(x##1) of(x##2) of(x##3) of(x##4) of(x##5) of(x##6) of(x##7) \
    of(x##8) of(x##9) of(x##a) of(x##b) of(x##c) of(x##d) of(x##e) of(x##f)
#define ALL(of) EACH(0, of) EACH(1, of) EACH(2, of) EACH(3, of) EACH(4, of) EACH(5, of) EACH(6, of) EACH(7, of)
ALL(ONE)
#define NAME(at) enter_##at,
static const Method entries[] = {ALL(NAME)};

/* watch(address, hook): of a definition; the hook is called first, with the object and an argument; None ends it. */
static PyObject *watch(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address;
    PyObject *hook;
    if (!PyArg_ParseTuple(args, "KO", &address, &hook))
        return NULL;
    PyMethodDef *definition = (PyMethodDef *)(uintptr_t)address;
    size_t at = 0, count = sizeof watched / sizeof *watched;
    while (at < count && watched[at].definition != NULL && watched[at].definition != definition)
        at++;
    if (at == count || definition->ml_flags & METH_METHOD) {
        PyErr_SetString(PyExc_RuntimeError, "a method that cannot be watched");
        return NULL;
    }
    if (watched[at].definition == NULL) {
        watched[at].definition = definition;
        watched[at].original = (Method)(void (*)(void))definition->ml_meth;
    }
    PyObject *before = watched[at].hook;
    watched[at].hook = hook == Py_None ? NULL : Py_NewRef(hook);
    definition->ml_meth = (PyCFunction)(void (*)(void))(hook == Py_None ? watched[at].original : entries[at]);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"watch", watch, METH_VARARGS, "Has a function called before a method of C, whoever calls it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_methods", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__methods(void) { return PyModule_Create(&MODULE); }
