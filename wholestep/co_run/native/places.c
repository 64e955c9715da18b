/* Where tensors lie in memory, and what stands for the arguments of a call in its key. _places.pyi says what each function
 * answers.
 *
 * A step of 450 operators has some 2,000 tensors among their arguments, of which Python would ask five methods each. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <string.h>

enum { KINDS = 3, DIMS = 8 };
typedef int32_t get_int_t(void *tensor, int32_t *out);
typedef int32_t get_long_t(void *tensor, int64_t *out);
typedef int32_t get_list_t(void *tensor, int64_t **out);

static PyTypeObject *kinds[KINDS];            /* of plain tensors */
static Py_ssize_t cpp, storage_at, keys_at;   /* offsets within the Python object, and within what it refers to */
static uint64_t plain_keys;                   /* the dispatch keys that plain tensors have */
static get_long_t *get_dim, *get_offset;
static get_int_t *get_dtype;
static get_list_t *get_sizes, *get_strides;
static PyObject *yes, *no, *number;           /* stand for bools, and for floats that may be others */

/* The C++ part of a tensor of torch's own classes, with elements that lie in memory by strides; NULL for all else. */
static char *plain(PyObject *object) {
    PyTypeObject *kind = Py_TYPE(object);
    if (kind != kinds[0] && kind != kinds[1] && kind != kinds[2])
        return NULL;
    char *found = *(char **)((char *)object + cpp);
    return found == NULL || (*(uint64_t *)(found + keys_at) & ~plain_keys) ? NULL : found;
}

static PyObject *place_at(PyObject *object, const char *found) {
    int64_t words[3 + 2 * DIMS], dim, *sizes, *strides;
    int32_t dtype;
    void *tensor = (char *)object + cpp;
    if (get_dim(tensor, &dim) || dim > DIMS || get_sizes(tensor, &sizes) || get_strides(tensor, &strides) ||
        get_dtype(tensor, &dtype) || get_offset(tensor, &words[0]))
        return Py_NewRef(Py_None);
    words[1] = dtype, words[2] = dim;
    memcpy(words + 3, sizes, (size_t)dim * sizeof *words);
    memcpy(words + 3 + dim, strides, (size_t)dim * sizeof *words);
    PyObject *place = PyTuple_New(2), *storage = PyLong_FromSize_t(*(size_t *)(found + storage_at));
    PyObject *rest = PyBytes_FromStringAndSize((char *)words, (3 + 2 * dim) * (Py_ssize_t)sizeof *words);
    if (place == NULL || storage == NULL || rest == NULL)
        return Py_XDECREF(place), Py_XDECREF(storage), Py_XDECREF(rest), NULL;
    PyTuple_SetItem(place, 0, storage), PyTuple_SetItem(place, 1, rest);
    return place;
}

static PyObject *place(PyObject *self, PyObject *object) {
    (void)self;
    const char *found = plain(object);
    return found == NULL ? Py_NewRef(Py_None) : place_at(object, found);
}

static PyObject *storage(PyObject *self, PyObject *object) {
    (void)self;
    const char *found = plain(object);
    return found == NULL ? Py_NewRef(Py_None) : PyLong_FromSize_t(*(size_t *)(found + storage_at));
}

static PyObject *several(PyObject *values, PyObject *slots, PyObject *numbers, PyObject *other);

static PyObject *part(PyObject *value, PyObject *slots, PyObject *numbers, PyObject *other) {
    PyTypeObject *kind = Py_TYPE(value);
    if (kind == &PyLong_Type || value == Py_None)
        return Py_NewRef(value);
    if (kind == &PyBool_Type)
        return Py_NewRef(value == Py_True ? yes : no);
    if (kind == &PyList_Type || kind == &PyTuple_Type)
        return several(value, slots, numbers, other);
    if (kind == &PyFloat_Type && numbers != Py_None)
        return PyList_Append(numbers, value) < 0 ? NULL : Py_NewRef(number);
    const char *tensor = plain(value);
    if (tensor != NULL) {
        PyObject *key = place_at(value, tensor);
        PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(slots, key);
        Py_XDECREF(key);
        if (found != NULL || PyErr_Occurred())
            return Py_XNewRef(found);
    }
    return PyObject_CallFunctionObjArgs(other, value, NULL);
}

static PyObject *several(PyObject *values, PyObject *slots, PyObject *numbers, PyObject *other) {
    const int is_list = PyList_Check(values);
    Py_ssize_t count = is_list ? PyList_Size(values) : PyTuple_Size(values);
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *value = is_list ? PyList_GetItem(values, i) : PyTuple_GetItem(values, i); /* NULL: a list that shrinks */
        PyObject *found = value == NULL ? NULL : part(value, slots, numbers, other);
        if (found == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SetItem(made, i, found);
    }
    return made;
}

static PyObject *parts(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 4 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1]))
        return PyErr_SetString(PyExc_TypeError, "parts(values, slots, numbers, other)"), NULL;
    return several(args[0], args[1], args[2], args[3]);
}

static PyObject *use(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t dim, dtype, sizes, strides, offset;
    unsigned long long keys;
    PyObject *classes[KINDS];
    if (!PyArg_ParseTuple(args, "(OOO)(nnn)K(nnnnn)(OOO)", &classes[0], &classes[1], &classes[2], &cpp, &storage_at,
                          &keys_at, &keys, &dim, &dtype, &sizes, &strides, &offset, &yes, &no, &number))
        return NULL;
    plain_keys = keys, get_dim = (get_long_t *)dim, get_dtype = (get_int_t *)dtype;
    get_sizes = (get_list_t *)sizes, get_strides = (get_list_t *)strides, get_offset = (get_long_t *)offset;
    for (int i = 0; i < KINDS; i++) kinds[i] = (PyTypeObject *)Py_NewRef(classes[i]);
    Py_INCREF(yes), Py_INCREF(no), Py_INCREF(number);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"place", place, METH_O, "A key for a tensor's place in memory; None for a tensor that is not plain."},
    {"storage", storage, METH_O, "What identifies its storage; None likewise."},
    {"parts", (PyCFunction)(void (*)(void))parts, METH_FASTCALL, "What stands for arguments, tensors by a table of slots."},
    {"use", use, METH_VARARGS, "Says how tensors are read, and what stands for bools and floats."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_places", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__places(void) { return PyModule_Create(&MODULE); }
