/* Types and shapes of tensors in integers, for ranks to tell each other. */
#ifndef UNISONO_SHAPES_H
#define UNISONO_SHAPES_H

#include "binding.h"

enum { DTYPE, DIMS, LENGTHS }; /* a tensor in integers: type, number of dimensions, their lengths */

bool look_at(PyObject *object, dl_tensor *d); /* false: DLPack does not show it */
void describe(int64_t *to, const dl_tensor *d, size_t most_dims); /* lengths: of up to so many */
PyObject *as_tuple(const int64_t *integers, size_t count);

/* Rows of so many bytes each, as streams: one for each rank. To be freed with PyMem_Free. */
un_stream *streams_of_rows(const Group *self, char *rows, size_t bytes);

/* Everybody's integers, equally many. A status, or -1 with an exception. */
int gather_integers(Group *self, const int64_t *mine, size_t count, int64_t *rows);

#endif
