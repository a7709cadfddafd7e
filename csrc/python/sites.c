/* Sites: where in the caller's program a call was made, found by walking up the Python stack
 * past our own files. The text of a line is made once for each instruction that calls us, and
 * cached by that instruction: Python searches the line table of the function for its line. A
 * program that makes code as it runs (a notebook, a REPL, a test run) has new instructions all the
 * time: when there are many, the cache is cleared, and those still in use soon return. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "binding.h"

enum { PLACES = 2048, WHOLE_CODE = -2, SITES_KEPT = 1 << 12 };

/* An instruction of a code object; WHOLE_CODE says whether the code is ours. */
typedef struct code_place {
    PyObject *code;
    int instruction;
    bool own;
    un_site *site;
} code_place;

/* An attribute of every frame, found once: its descriptor, and how Python reads it. */
typedef struct frame_attribute {
    const char *name;
    PyObject *descriptor;
    descrgetfunc get;
} frame_attribute;

static frame_attribute outer_frame = {.name = "f_back"};
static frame_attribute last_instruction = {.name = "f_lasti"};
static code_place places[PLACES];
static int places_known;
/* Calls under way point here: a site is overwritten only by the SITES_KEPT-th one after it. */
static un_site sites[SITES_KEPT];
static uint32_t sites_made;
static PyObject *own_paths;     /* a tuple of str, */
static PyObject *program_paths; /* and one of folders in there that count as user programs */
static PyObject *get_frame, *innermost; /* sys._getframe and its argument */
/* The same in C, and its module; NULL if it is not the usual one, or called in another way. */
static PyObject *(*get_frame_in_c)(PyObject *, PyObject *const *, Py_ssize_t);
static PyObject *sys_module;
static PyObject *locating; /* called to find out where the program is */
bool all_sites_are_kept;

/* keep_sites(wanted): those of blocking calls too, in all groups */
PyObject *module_keep_sites(PyObject *module, PyObject *wanted) {
    (void)module;
    all_sites_are_kept = PyObject_IsTrue(wanted) > 0;
    Py_RETURN_NONE;
}

static PyObject *read_attribute(frame_attribute *a, PyObject *frame) {
    if (!a->get) {
        a->descriptor = PyObject_GetAttrString((PyObject *)Py_TYPE(frame), a->name);
        if (!a->descriptor) return NULL;
        a->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(a->descriptor), Py_tp_descr_get);
    }
    return a->get(a->descriptor, frame, NULL);
}

static code_place *find_place(PyObject *code, int instruction) {
    size_t start = ((uintptr_t)code >> 4) * 31 + (size_t)instruction;
    for (size_t i = 0;; i++) { /* there is a free entry, so it ends */
        code_place *p = &places[(start + i) % PLACES];
        if (!p->code || (p->code == code && p->instruction == instruction)) return p;
    }
}

/* The code object is kept alive while its place is cached, so that its address stays unique. */
static void remember_place(code_place *p, PyObject *code, int instruction) {
    places_known++;
    p->code = Py_NewRef(code);
    p->instruction = instruction;
}

/* Dropping the last reference to a code object may run any code, including this. */
static void forget_places(void) {
    PyObject *codes[PLACES];
    for (int i = 0; i < PLACES; i++) codes[i] = places[i].code;
    memset(places, 0, sizeof places);
    places_known = 0;
    for (int i = 0; i < PLACES; i++) Py_XDECREF(codes[i]);
}

/* The place, or where to cache it; there is enough room for searches to end soon. */
static code_place *find_or_make_room(PyObject *code, int instruction) {
    if (places_known >= PLACES / 4 * 3) forget_places();
    return find_place(code, instruction);
}

static bool starts_with(PyObject *file, PyObject *paths) {
    PyObject *starts = file ? PyObject_CallMethod(file, "startswith", "(O)", paths) : NULL;
    bool does = starts && PyObject_IsTrue(starts) > 0;
    Py_XDECREF(starts);
    PyErr_Clear();
    return does;
}

static bool code_is_own(PyObject *code) {
    code_place *p = find_place(code, WHOLE_CODE);
    if (p->code) return p->own;
    PyObject *file = PyObject_GetAttrString(code, "co_filename");
    bool own = starts_with(file, own_paths) && !starts_with(file, program_paths);
    Py_XDECREF(file);
    p = find_or_make_room(code, WHOLE_CODE); /* `startswith` may have added others */
    if (!p->code) remember_place(p, code, WHOLE_CODE);
    p->own = own;
    return own;
}

/* "train.py:42 in step"; the file as seen from the current folder. */
static void write_out(char text[UN_TEXT_BYTES], PyObject *code, int line) {
    PyObject *file = PyObject_GetAttrString(code, "co_filename");
    PyObject *name = PyObject_GetAttrString(code, "co_qualname");
    PyObject *file_bytes = file ? PyUnicode_AsUTF8String(file) : NULL;
    PyObject *name_bytes = name ? PyUnicode_AsUTF8String(name) : NULL;
    const char *path = file_bytes ? PyBytes_AsString(file_bytes) : "?";
    char folder[4096];
    size_t length = getcwd(folder, sizeof folder) ? strlen(folder) : 0;
    if (length > 1 && !strncmp(path, folder, length) && path[length] == '/') path += length + 1;
    size_t most = UN_TEXT_BYTES - 64; /* the end of a long path says more */
    if (strlen(path) > most) path += strlen(path) - most;
    snprintf(text, UN_TEXT_BYTES, "%s:%d in %s", path, line,
             name_bytes ? PyBytes_AsString(name_bytes) : "?");
    Py_XDECREF(name_bytes);
    Py_XDECREF(file_bytes);
    Py_XDECREF(name);
    Py_XDECREF(file);
    PyErr_Clear();
}

static const un_site *site_of_instruction(PyObject *code, PyObject *frame) {
    PyObject *number = read_attribute(&last_instruction, frame);
    if (!number) return NULL;
    int instruction = (int)PyLong_AsLong(number);
    Py_DECREF(number);
    code_place *p = find_place(code, instruction);
    if (p->code) return p->site;
    if (++sites_made % SITES_KEPT == 0) sites_made++; /* in a record 0 means unknown */
    un_site *site = &sites[sites_made % SITES_KEPT];
    site->number = sites_made;
    write_out(site->text, code, PyFrame_GetLineNumber((PyFrameObject *)frame));
    p = find_or_make_room(code, instruction);
    if (!p->code) remember_place(p, code, instruction);
    p->site = site;
    return site;
}

/* The innermost line that is not ours, from `frame` outwards; NULL: from the frame that called us,
 * which may be ours. Python makes an object of each frame that is looked at, so the
 * fewer the better. Leaves a pending exception alone. */
const un_site *site_of_frame(PyObject *frame) {
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    const un_site *site = NULL;
    if (!own_paths) return NULL;
    if (PyErr_Occurred()) PyErr_Fetch(&type, &value, &traceback);
    if (frame)
        Py_INCREF(frame);
    else
        frame = get_frame_in_c ? get_frame_in_c(sys_module, &innermost, 1)
                               : PyObject_CallFunctionObjArgs(get_frame, innermost, NULL);
    while (frame && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        bool own = code_is_own(code);
        if (!own) site = site_of_instruction(code, frame);
        Py_DECREF(code);
        if (!own) break;
        PyObject *outer = read_attribute(&outer_frame, frame);
        Py_DECREF(frame);
        frame = outer;
    }
    Py_XDECREF(frame);
    if (type || !site) PyErr_Restore(type, value, traceback);
    return site;
}

const un_site *current_site(void) { return site_of_frame(NULL); }

/* site_of(frame): its text, or None. */
PyObject *module_site_of(PyObject *module, PyObject *frame) {
    (void)module;
    const un_site *site = site_of_frame(frame);
    if (!site) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(site->text, (Py_ssize_t)strlen(site->text), "replace"); /* cut */
}

static void locate(char text[UN_TEXT_BYTES]) {
    if (!Py_IsInitialized()) return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *said = locating ? PyObject_CallNoArgs(locating) : NULL;
    PyObject *bytes = said && PyUnicode_Check(said) ? PyUnicode_AsUTF8String(said) : NULL;
    if (bytes) snprintf(text, UN_TEXT_BYTES, "%s", PyBytes_AsString(bytes));
    Py_XDECREF(bytes);
    Py_XDECREF(said);
    PyErr_Clear();
    PyGILState_Release(state);
}

static void replace(PyObject **kept, PyObject *by) {
    PyObject *old = *kept;
    *kept = Py_XNewRef(by);
    Py_XDECREF(old);
}

/* prepare_sites(own_paths, program_paths, locating): the folders whose files are not the
 * caller's, the folders in there whose files are, and a function that says where the program is;
 * None when it must not be asked any more. */
PyObject *module_prepare_sites(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *programs, *locator;
    if (!PyArg_ParseTuple(arguments, "O!O!O", &PyTuple_Type, &paths, &PyTuple_Type, &programs,
                          &locator))
        return NULL;
    if (!get_frame) get_frame = Py_XNewRef(PySys_GetObject("_getframe"));
    if (get_frame && PyCFunction_Check(get_frame) &&
        PyCFunction_GetFlags(get_frame) == METH_FASTCALL) {
        get_frame_in_c = (void *)PyCFunction_GetFunction(get_frame);
        sys_module = PyCFunction_GetSelf(get_frame);
    }
    if (!innermost) innermost = PyLong_FromLong(0);
    if (!get_frame || !innermost) return PyErr_Format(PyExc_RuntimeError, "no sys._getframe");
    forget_places(); /* which code is ours may have changed */
    replace(&own_paths, paths);
    replace(&program_paths, programs);
    replace(&locating, locator == Py_None ? NULL : locator);
    un_set_locator(locating ? locate : NULL);
    Py_RETURN_NONE;
}
