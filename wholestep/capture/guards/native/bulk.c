/* What a binder compares in bulk: tables by identity, and tensors by what their C++ part holds.
 *
 * A model of 20 layers has some 600 attributes, 500 empty tables of hooks and 160 tensors. _bulk.pyi says what each
 * function answers. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <string.h>

static PyObject *any, *grad; /* any: stands for a value that is compared elsewhere */

/* torch's C interface takes the address of a C++ tensor, which lies within the Python object and refers to what the
 * methods of C++ take. */
typedef int32_t get_int_t(void *tensor, int32_t *out);
typedef int32_t get_long_t(void *tensor, int64_t *out);
typedef int32_t get_list_t(void *tensor, int64_t **out);
typedef _Bool get_flag_t(void *tensor);
typedef void **get_tensor_t(void *tensor);
typedef int64_t get_number_t(void *tensor);
typedef void change_t(void *tensor);
typedef uint8_t setting_t(intptr_t argument);
static PyTypeObject *base;
static Py_ssize_t cpp, hook_tables[2]; /* offsets within the Python object */
static Py_ssize_t version_at;          /* within a dictionary */
static get_int_t *get_dtype, *get_device_type, *get_device_index;
static get_long_t *get_dim;
static get_list_t *get_sizes, *get_strides;
static get_flag_t *requires_grad, *is_inference;
static get_number_t *get_version;
static change_t *count_write;
static get_tensor_t *get_grad;
enum { FEW_WRITES = 64 }; /* which `advance` counts one by one */
static void *undefined; /* what a tensor without a gradient has in its place */

/* Whether two keys are one: the same object, or equal texts or whole numbers. */
static int same_key(PyObject *found, PyObject *expected) {
    if (found == expected)
        return 1;
    PyTypeObject *kind = Py_TYPE(expected);
    if (Py_TYPE(found) != kind || (kind != &PyUnicode_Type && kind != &PyLong_Type))
        return 0;
    return PyObject_RichCompareBool(found, expected, Py_EQ);
}

/* The number that each change of a dictionary replaces by one that none had before; 0 where that is unknown. */
static uintptr_t version(PyObject *table) {
    return version_at ? *(uintptr_t *)((char *)table + version_at) : 0;
}

/* A table with its keys and values as words: dict, number of keys, ordered, the version that was found to hold them
 * last, then each key and value. */
enum { BEFORE_PAIRS = 4 };
static int same_table(PyObject **words) {
    PyObject *table = words[0], *key, *value, **pairs = words + BEFORE_PAIRS;
    Py_ssize_t count = (Py_ssize_t)words[1], at = 0;
    uintptr_t now = version(table);
    if (now && now == (uintptr_t)words[3])
        return 1;
    if (PyDict_Size(table) != count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(table, &at, &key, &value); i++) {
        int same = same_key(key, pairs[2 * i]);
        if (same < 0)
            return -1;
        if (!same) {
            if (words[2] != NULL)
                return 0;
            value = PyDict_GetItemWithError(table, pairs[2 * i]);
            if (value == NULL)
                return PyErr_Occurred() ? -1 : 0;
        }
        if (value != pairs[2 * i + 1] && pairs[2 * i + 1] != any)
            return 0;
    }
    words[3] = (PyObject *)now;
    return 1;
}

static PyObject *flatten(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tables, *empty, *table, *keys, *values;
    int ordered;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tables, &PyList_Type, &empty))
        return NULL;
    Py_ssize_t count = PyList_Size(tables), none = PyList_Size(empty), size = 2 + none + BEFORE_PAIRS * count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(tables, i), "O!O!O!p", &PyDict_Type, &table, &PyTuple_Type, &keys,
                              &PyTuple_Type, &values, &ordered))
            return NULL;
        size += 2 * PyTuple_Size(keys);
    }
    PyObject *found = PyByteArray_FromStringAndSize(NULL, size * (Py_ssize_t)sizeof(PyObject *));
    if (found == NULL)
        return NULL;
    PyObject **words = (PyObject **)PyByteArray_AsString(found);
    *words++ = (PyObject *)none;
    for (Py_ssize_t i = 0; i < none; i++) *words++ = PyList_GetItem(empty, i);
    *words++ = (PyObject *)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyArg_ParseTuple(PyList_GetItem(tables, i), "OOOp", &table, &keys, &values, &ordered))
            return Py_DecRef(found), NULL;
        Py_ssize_t width = PyTuple_Size(keys);
        *words++ = table, *words++ = (PyObject *)width, *words++ = ordered ? table : NULL, *words++ = NULL;
        for (Py_ssize_t j = 0; j < width; j++)
            *words++ = PyTuple_GetItem(keys, j), *words++ = PyTuple_GetItem(values, j);
    }
    return found;
}

static PyObject *match(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *flat, *tables, *empty; /* the lists keep alive what the words refer to */
    if (!PyArg_ParseTuple(args, "YO!O!", &flat, &PyList_Type, &tables, &PyList_Type, &empty))
        return NULL;
    PyObject **words = (PyObject **)PyByteArray_AsString(flat);
    for (Py_ssize_t i = (Py_ssize_t)*words++; i > 0; i--)
        if (PyDict_Size(*words++) != 0)
            Py_RETURN_FALSE;
    for (Py_ssize_t i = (Py_ssize_t)*words++; i > 0; i--, words += BEFORE_PAIRS + 2 * (Py_ssize_t)words[1]) {
        int same = same_table(words);
        if (same < 0)
            return NULL;
        if (!same)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int append_values(PyObject *found, PyObject *table) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(table, &at, &key, &value))
        if (PyList_Append(found, value) < 0)
            return -1;
    return 0;
}

/* Whether all tables within others, in their order, have the keys expected; their values join a list. */
static int append_nested(PyObject *found, PyObject *tables, PyObject *keys) {
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(tables); i++) {
        PyObject *owner, *table, *key, *value, *outer = PyList_GetItem(tables, i);
        for (Py_ssize_t at = 0; PyDict_Next(outer, &at, &owner, &table);) {
            PyObject *expected = PyList_GetItem(keys, count++);
            if (expected == NULL || !PyDict_Check(table) || PyDict_Size(table) != PyTuple_Size(expected))
                return PyErr_Clear(), 0;
            Py_ssize_t next = 0;
            for (Py_ssize_t j = 0; PyDict_Next(table, &next, &key, &value); j++) {
                int same = same_key(key, PyTuple_GetItem(expected, j));
                if (same <= 0 || PyList_Append(found, value) < 0)
                    return same ? -1 : 0;
            }
        }
    }
    return count == PyList_Size(keys);
}

/* What `gather` has found last, as words: whether `recall` has seen it, numbers of tables and values; each table and its
 * version; the values, which live as long as their tables have these versions. */
enum { SEEN, TABLES, VALUES, BEFORE_TABLES };
static PyObject **note_table(PyObject **words, PyObject *table) {
    return *words++ = table, *words++ = (PyObject *)version(table), words;
}

static int remember(PyObject *memo, PyObject *found, PyObject *whole, PyObject *nested) {
    PyObject *owner, *table;
    Py_ssize_t values = PyList_Size(found), tables = PyList_Size(whole) + PyList_Size(nested), at;
    for (Py_ssize_t i = 0; i < PyList_Size(nested); i++) tables += PyDict_Size(PyList_GetItem(nested, i));
    if (PyByteArray_Resize(memo, (BEFORE_TABLES + 2 * tables + values) * (Py_ssize_t)sizeof(PyObject *)) < 0)
        return -1;
    PyObject **words = (PyObject **)PyByteArray_AsString(memo);
    words[SEEN] = NULL, words[TABLES] = (PyObject *)tables, words[VALUES] = (PyObject *)values;
    words += BEFORE_TABLES;
    for (Py_ssize_t i = 0; i < PyList_Size(whole); i++) words = note_table(words, PyList_GetItem(whole, i));
    for (Py_ssize_t i = 0; i < PyList_Size(nested); i++) {
        words = note_table(words, PyList_GetItem(nested, i));
        for (at = 0; PyDict_Next(PyList_GetItem(nested, i), &at, &owner, &table);) words = note_table(words, table);
    }
    for (Py_ssize_t i = 0; i < values; i++) *words++ = PyList_GetItem(found, i);
    return 1;
}

/* The values that were found last, where no table has changed since; else NULL, maybe without an error. */
static PyObject *remembered(PyObject **words) {
    PyObject **tables = words + BEFORE_TABLES, **values = tables + 2 * (Py_ssize_t)words[TABLES];
    for (; tables < values; tables += 2)
        if (version(tables[0]) != (uintptr_t)tables[1])
            return NULL;
    PyObject *found = PyList_New((Py_ssize_t)words[VALUES]);
    for (Py_ssize_t i = 0; found != NULL && i < (Py_ssize_t)words[VALUES]; i++)
        PyList_SetItem(found, i, Py_NewRef(values[i]));
    return found;
}

static PyObject *gather(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *memo, *whole, *nested, *keys;
    if (!PyArg_ParseTuple(args, "YO!O!O!", &memo, &PyList_Type, &whole, &PyList_Type, &nested, &PyList_Type, &keys))
        return NULL;
    PyObject *found = PyByteArray_Size(memo) ? remembered((PyObject **)PyByteArray_AsString(memo)) : NULL;
    if (found != NULL || PyErr_Occurred())
        return found;
    found = PyList_New(0);
    int good = found == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; good > 0 && i < PyList_Size(whole); i++)
        good = append_values(found, PyList_GetItem(whole, i)) < 0 ? -1 : 1;
    if (good > 0)
        good = append_nested(found, nested, keys);
    if (good > 0 && version_at)
        good = remember(memo, found, whole, nested);
    if (good > 0)
        return found;
    Py_XDECREF(found);
    if (good < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *recall(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *found, *weak, *last, *memo;
    if (!PyArg_ParseTuple(args, "O!O!O!Y", &PyList_Type, &found, &PyTuple_Type, &weak, &PyList_Type, &last, &memo))
        return NULL;
    PyObject **words = PyByteArray_Size(memo) ? (PyObject **)PyByteArray_AsString(memo) : NULL;
    Py_ssize_t count = PyTuple_Size(weak), seen = words != NULL && words[SEEN] ? (Py_ssize_t)words[VALUES] : 0;
    int same = PyList_Size(found) == count;
    for (Py_ssize_t i = 0; i < seen; i++)
        if (PyList_SetItem(last, i, Py_XNewRef(PyList_GetItem(found, i))) < 0)
            return NULL;
    for (Py_ssize_t i = seen; i < count; i++) {
        PyObject *reference = PyTuple_GetItem(weak, i);
        PyObject *value = reference == Py_None ? Py_None : PyWeakref_GetObject(reference);
        if (value == NULL || PyList_SetItem(last, i, Py_NewRef(value)) < 0)
            return NULL;
        same = same && PyList_GetItem(found, i) == value;
    }
    if (same && words != NULL)
        words[SEEN] = (PyObject *)1;
    return PyBool_FromLong(same);
}

static void *tensor_at(PyObject *sequence, Py_ssize_t i) {
    PyObject *found = PyTuple_GetItem(sequence, i);
    if (found != NULL && base != NULL && PyObject_TypeCheck(found, base))
        return found;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "expected tensors, after `use`");
    return NULL;
}

static int32_t describe(char *object, int64_t *words, int64_t *dim) {
    void *tensor = object + cpp;
    int64_t *list;
    int32_t dtype, type, index;
    if (get_dim(tensor, dim) || get_dtype(tensor, &dtype) || get_device_type(tensor, &type) ||
        get_device_index(tensor, &index) || *dim > 64)
        return -1;
    words[0] = *dim, words[1] = dtype, words[2] = (int64_t)type << 32 | (uint32_t)index;
    words[3] = requires_grad(*(void **)tensor);
    if (get_sizes(tensor, &list))
        return -1;
    memcpy(words + 4, list, sizeof(int64_t) * (size_t)*dim);
    if (get_strides(tensor, &list))
        return -1;
    memcpy(words + 4 + *dim, list, sizeof(int64_t) * (size_t)*dim);
    return 0;
}

static PyObject *layouts(PyObject *self, PyObject *tensors) {
    (void)self;
    enum { MOST = 4 + 2 * 64 };
    Py_ssize_t count = PyTuple_Size(tensors), used = 0, size = 16 * count + MOST;
    if (count < 0)
        return NULL;
    int64_t *words = PyMem_Malloc(sizeof(int64_t) * (size_t)size), dim;
    for (Py_ssize_t i = 0; words != NULL && i < count; i++, used += 4 + 2 * dim) {
        char *object = tensor_at(tensors, i);
        if (used + MOST > size) {
            size = 2 * size + MOST;
            int64_t *more = PyMem_Realloc(words, sizeof(int64_t) * (size_t)size);
            if (more == NULL)
                PyMem_Free(words);
            words = more;
        }
        if (words != NULL && (object == NULL || describe(object, words + used, &dim))) {
            PyMem_Free(words);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "a tensor without sizes and strides");
            return NULL;
        }
    }
    if (words == NULL)
        return PyErr_NoMemory();
    PyObject *found = PyBytes_FromStringAndSize((char *)words, (Py_ssize_t)sizeof(int64_t) * used);
    PyMem_Free(words);
    return found;
}

static PyObject *hooks(PyObject *self, PyObject *tensors) {
    (void)self;
    Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = count < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        char *object = tensor_at(tensors, i);
        for (int j = 0; j < 2; j++) {
            PyObject *table = object == NULL ? NULL : *(PyObject **)(object + hook_tables[j]);
            PyObject *pair = table == NULL || table == Py_None ? NULL : Py_BuildValue("(nO)", 2 * i + j, table);
            if (PyErr_Occurred() || (pair != NULL && PyList_Append(found, pair) < 0)) {
                Py_XDECREF(pair);
                Py_DECREF(found);
                return NULL;
            }
            Py_XDECREF(pair);
        }
    }
    return found;
}

static PyObject *grads(PyObject *self, PyObject *tensors) {
    (void)self;
    Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = count < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        char *object = tensor_at(tensors, i);
        int none = object != NULL && *get_grad(*(void **)(object + cpp)) == undefined;
        PyObject *value = NULL;
        if (object != NULL)
            value = none ? Py_NewRef(Py_None) : PyObject_GetAttr((PyObject *)object, grad);
        if (value == NULL || PyList_SetItem(found, i, value) < 0)
            return Py_DecRef(found), NULL;
    }
    return found;
}

/* Whether writes to a tensor are counted; C++ raises an exception where one asks for the counter otherwise. */
static char *counted_at(PyObject *tensors, Py_ssize_t i) {
    char *object = tensor_at(tensors, i);
    if (object != NULL && is_inference(object + cpp)) {
        PyErr_SetString(PyExc_RuntimeError, "Inference tensors do not track version counter.");
        return NULL;
    }
    return object;
}

static PyObject *versions(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tensors, *writes;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &writes))
        return NULL;
    Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        char *object = counted_at(tensors, i);
        PyObject *more = object == NULL ? NULL : PyTuple_GetItem(writes, i), *version = NULL;
        int64_t added = more == NULL ? 0 : PyLong_AsLongLong(more);
        if (!PyErr_Occurred())
            version = PyLong_FromLongLong(get_version(object + cpp) + added);
        if (version == NULL || PyTuple_SetItem(found, i, version) < 0)
            return Py_DecRef(found), NULL;
    }
    return found;
}

static PyObject *advance(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tensors, *wanted;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &wanted))
        return NULL;
    int reached = 1;
    for (Py_ssize_t i = 0, count = PyTuple_Size(tensors); i < count; i++) {
        char *object = counted_at(tensors, i);
        PyObject *version = object == NULL ? NULL : PyTuple_GetItem(wanted, i);
        int64_t goal = version == NULL ? 0 : PyLong_AsLongLong(version);
        if (PyErr_Occurred())
            return NULL;
        int64_t now = get_version(object + cpp);
        for (; now < goal && now + FEW_WRITES >= goal; now++) count_write(object + cpp);
        reached = reached && now == goal;
    }
    return PyBool_FromLong(reached);
}

static PyObject *identical(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *left, *right, *a = NULL, *b = NULL;
    if (!PyArg_ParseTuple(args, "OO", &left, &right))
        return NULL;
    left = PyObject_GetIter(left), right = left == NULL ? NULL : PyObject_GetIter(right);
    int same = right != NULL;
    while (same && (a = PyIter_Next(left)) != NULL) {
        b = PyIter_Next(right);
        same = a == b;
        Py_DecRef(a), Py_DecRef(b);
    }
    Py_XDECREF(left), Py_XDECREF(right);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

static PyObject *settings(PyObject *self, PyObject *functions) {
    (void)self;
    char *pairs;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(functions, &pairs, &size) < 0)
        return NULL;
    intptr_t *words = (intptr_t *)pairs;
    Py_ssize_t count = size / (Py_ssize_t)(2 * sizeof *words);
    PyObject *found = PyBytes_FromStringAndSize(NULL, count);
    char *bytes = found == NULL ? NULL : PyBytes_AsString(found);
    for (Py_ssize_t i = 0; bytes != NULL && i < count; i++)
        bytes[i] = (char)((setting_t *)words[2 * i])(words[2 * i + 1]);
    return found;
}

static PyObject *use(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *kind, *probe;
    Py_ssize_t dim, dtype, type, index, sizes, strides, wanted, gradient, inference, version, write;
    if (!PyArg_ParseTuple(args, "O!(nnn)(nnnnnnnnnnn)O", &PyType_Type, &kind, &cpp, &hook_tables[0], &hook_tables[1],
                          &dim, &dtype, &type, &index, &sizes, &strides, &wanted, &gradient, &inference, &version,
                          &write, &probe))
        return NULL;
    requires_grad = (get_flag_t *)wanted, is_inference = (get_flag_t *)inference, get_grad = (get_tensor_t *)gradient;
    get_version = (get_number_t *)version, count_write = (change_t *)write;
    undefined = *get_grad(*(void **)((char *)probe + cpp));
    get_dim = (get_long_t *)dim, get_dtype = (get_int_t *)dtype;
    get_device_type = (get_int_t *)type, get_device_index = (get_int_t *)index;
    get_sizes = (get_list_t *)sizes, get_strides = (get_list_t *)strides;
    base = (PyTypeObject *)Py_NewRef(kind);
    Py_RETURN_NONE;
}

static PyObject *use_versions(PyObject *self, PyObject *offset) {
    (void)self;
    version_at = PyLong_AsSsize_t(offset);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef METHODS[] = {
    {"flatten", flatten, METH_VARARGS, "Tables as words, for `match`."},
    {"match", match, METH_VARARGS, "Whether dictionaries hold what they held, and others nothing."},
    {"gather", gather, METH_VARARGS, "The values of dictionaries, and of those within others where their keys are known."},
    {"recall", recall, METH_VARARGS, "Fills a list with what weak references refer to; whether another has the same."},
    {"layouts", layouts, METH_O, "Sizes, strides, dtypes, devices and requires_grad of a tuple of tensors, as bytes."},
    {"hooks", hooks, METH_O, "Hook tables of a tuple of tensors that have any, each with its number."},
    {"grads", grads, METH_O, "The gradients of a tuple of tensors."},
    {"versions", versions, METH_VARARGS, "The version counters of tensors after so many more writes to each."},
    {"advance", advance, METH_VARARGS, "Moves version counters on; whether each is then at a number."},
    {"identical", identical, METH_VARARGS, "Whether two iterables of one length hold the very same objects."},
    {"settings", settings, METH_O, "What functions give for their arguments, pairs of words, as bytes."},
    {"use", use, METH_VARARGS, "Says the class of tensors, offsets within them, torch's functions, a tensor as probe."},
    {"use_versions", use_versions, METH_O, "Says where dictionaries have their versions; 0: nowhere."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_bulk", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bulk(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module == NULL)
        return NULL;
    grad = PyUnicode_InternFromString("grad");
    any = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (any == NULL || grad == NULL || PyModule_AddObjectRef(module, "ANY", any) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
