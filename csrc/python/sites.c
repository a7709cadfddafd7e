/* Sites: where in the caller's program a call was made, found by walking up the Python stack
 * past our own files. The text of a line is made once and cached. A program that makes code as
 * it runs (a notebook, a REPL, a test run) has new lines all the time: when there are many, the
 * cache is cleared, and lines still in use soon return. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "binding.h"

enum { LINES = 2048, WHOLE_CODE = -1, SITES_KEPT = 1 << 12 };

/* A line of a code object; line WHOLE_CODE says whether the code is ours. */
typedef struct code_line {
    PyObject *code;
    int line;
    bool own;
    un_site *site;
} code_line;

static code_line lines[LINES];
static int lines_known;
/* Calls under way point here: a site is overwritten only by the SITES_KEPT-th one after it. */
static un_site sites[SITES_KEPT];
static uint32_t sites_made;
static PyObject *own_paths;     /* a tuple of str, */
static PyObject *program_paths; /* and one of folders in there that count as user programs */
static PyObject *back_name;
static PyObject *locating; /* called to find out where the program is */
bool all_sites_are_kept;

/* keep_sites(wanted): those of blocking calls too, in all groups */
PyObject *module_keep_sites(PyObject *module, PyObject *wanted) {
    (void)module;
    all_sites_are_kept = PyObject_IsTrue(wanted) > 0;
    Py_RETURN_NONE;
}

static code_line *find_line(PyObject *code, int line) {
    size_t start = ((uintptr_t)code >> 4) * 31 + (size_t)line;
    for (size_t i = 0;; i++) { /* there is a free entry, so it ends */
        code_line *l = &lines[(start + i) % LINES];
        if (!l->code || (l->code == code && l->line == line)) return l;
    }
}

/* The code object is kept alive as long as its line is cached, so that its address stays unique. */
static void remember_line(code_line *l, PyObject *code, int line) {
    lines_known++;
    Py_INCREF(code);
    l->code = code;
    l->line = line;
}

/* Dropping the last reference to a code object may run any code, including this. */
static void forget_lines(void) {
    PyObject *codes[LINES];
    for (int i = 0; i < LINES; i++) codes[i] = lines[i].code;
    memset(lines, 0, sizeof lines);
    lines_known = 0;
    for (int i = 0; i < LINES; i++) Py_XDECREF(codes[i]);
}

/* The line, or where to cache it; there is enough room for searches to end soon. */
static code_line *find_or_make_room(PyObject *code, int line) {
    if (lines_known >= LINES / 4 * 3) forget_lines();
    return find_line(code, line);
}

static bool starts_with(PyObject *file, PyObject *paths) {
    PyObject *starts = file ? PyObject_CallMethod(file, "startswith", "(O)", paths) : NULL;
    bool does = starts && PyObject_IsTrue(starts) > 0;
    Py_XDECREF(starts);
    return does;
}

static bool code_is_own(PyObject *code) {
    code_line *l = find_line(code, WHOLE_CODE);
    if (l->code) return l->own;
    PyObject *file = PyObject_GetAttrString(code, "co_filename");
    bool own = starts_with(file, own_paths) && !starts_with(file, program_paths);
    Py_XDECREF(file);
    l = find_or_make_room(code, WHOLE_CODE); /* `startswith` may have added others */
    if (!l->code) remember_line(l, code, WHOLE_CODE);
    l->own = own;
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
}

static const un_site *site_of_line(PyObject *code, int line) {
    code_line *l = find_line(code, line);
    if (l->code) return l->site;
    if (++sites_made % SITES_KEPT == 0) sites_made++; /* in a record 0 means unknown */
    un_site *site = &sites[sites_made % SITES_KEPT];
    site->number = sites_made;
    write_out(site->text, code, line);
    l = find_or_make_room(code, line);
    if (!l->code) remember_line(l, code, line);
    l->site = site;
    return site;
}

/* The innermost line that is not ours, from `frame` outwards. Leaves a pending exception alone. */
const un_site *site_of_frame(PyObject *frame) {
    PyObject *type, *value, *traceback;
    const un_site *site = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XINCREF(frame);
    while (frame && frame != Py_None && own_paths) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        bool own = code_is_own(code); /* first: finding the line takes longer */
        if (!own) site = site_of_line(code, PyFrame_GetLineNumber((PyFrameObject *)frame));
        Py_DECREF(code);
        if (!own) break;
        PyObject *outer = PyObject_GetAttr(frame, back_name);
        Py_DECREF(frame);
        frame = outer;
    }
    Py_XDECREF(frame);
    PyErr_Restore(type, value, traceback);
    return site;
}

const un_site *current_site(void) { return site_of_frame((PyObject *)PyEval_GetFrame()); }

/* site_of(frame): its text, or None. */
PyObject *module_site_of(PyObject *module, PyObject *frame) {
    (void)module;
    const un_site *site = site_of_frame(frame);
    if (!site) Py_RETURN_NONE;
    return PyUnicode_FromString(site->text);
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

/* prepare_sites(own_paths, program_paths, locating): the folders whose files are not the
 * caller's, the folders in there whose files are, and a function that says where the program is;
 * None when it must not be asked any more. */
PyObject *module_prepare_sites(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *paths, *programs, *function;
    if (!PyArg_ParseTuple(arguments, "O!O!O", &PyTuple_Type, &paths, &PyTuple_Type, &programs,
                          &function))
        return NULL;
    if (!back_name) back_name = PyUnicode_InternFromString("f_back");
    if (!back_name) return NULL;
    forget_lines(); /* which code is ours may have changed */
    Py_INCREF(paths);
    Py_XDECREF(own_paths);
    own_paths = paths;
    Py_INCREF(programs);
    Py_XDECREF(program_paths);
    program_paths = programs;
    Py_XDECREF(locating);
    locating = function == Py_None ? NULL : function;
    Py_XINCREF(locating);
    un_set_locator(locating ? locate : NULL);
    Py_RETURN_NONE;
}
