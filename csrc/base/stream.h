/* User memory, strided or in many tensors, as one sequence of bytes. */
#ifndef UNISONO_STREAM_H
#define UNISONO_STREAM_H

#include "unisono.h"

char *stream_direct(const un_stream *s, size_t offset, size_t bytes);
void stream_read(char *to, const un_stream *s, size_t offset, size_t bytes);
void copy_twice(char *restrict near, char *restrict far, const char *restrict from, size_t bytes);
bool stream_is_new(const un_stream *s); /* untouched memory, judged by its middle page */
void make_pages(const un_stream *s, size_t offset, size_t bytes); /* of such memory, all at once */
void stream_write(const un_stream *s, size_t offset, const char *from, size_t bytes, bool large);

#endif
