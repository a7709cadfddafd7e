/* The record of every call, and notes for peers. */
#ifndef UNISONO_RECORDS_H
#define UNISONO_RECORDS_H

#include "base/group.h"

uint64_t open_record(un_group *g, uint64_t signature, uint64_t bytes, uint64_t call,
                     const un_site *site, enum record_state state);
void record_call(un_group *g, uint64_t number, uint64_t call); /* from the queue */
void record_start(un_group *g, uint64_t number);
void record_end(un_group *g, uint64_t number, un_status status);
uint64_t signature_of(un_operation operation, unsigned reduction, int root, un_dtype dtype);
void write_note(note *n, uint64_t about, const char *text, size_t bytes);
COLD void write_shape_note(un_group *g, const char *before, const un_shape *shape, uint64_t number);
void ask_where(un_group *g, int rank, uint64_t call);
bool is_asked(const un_group *g);
void answer_where(un_group *g, const char *text);

#endif
