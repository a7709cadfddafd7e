/* User memory in one piece: what stream.c does with that, byte by byte. */
#include "base/stream.h"

char *stream_direct(const un_stream *s, size_t offset, size_t bytes) { return s->views->data + offset; }

void stream_read(char *to, const un_stream *s, size_t offset, size_t bytes) {
    copy_bytes(to, s->views->data + offset, bytes);
}

void stream_write(const un_stream *s, size_t offset, const char *from, size_t bytes, bool large) {
    copy_bytes(s->views->data + offset, from, bytes);
}
