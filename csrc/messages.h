/* What the files about messages share. */
#ifndef UNISONO_MESSAGES_H
#define UNISONO_MESSAGES_H

#include "internal.h"

enum { SLICE_NS = 50 * 1000 * 1000 }; /* the longest sleep without a look around */

/* channels.c */
void start_phases(un_message *m);
bool progress(un_group *g); /* let every message go as far as it can; whether any moved */
void ring_bell(un_group *g, int rank);
bool fits_entry(const un_message *m);
bool is_eager(const un_group *g, const un_message *m);
const flag_t *awaited_word(const un_group *g, const un_message *m); /* NULL: there is none */

/* courier.c */
bool look_for_progress(un_group *g); /* progress, with the lock */
void listen_at_door(un_group *g, int64_t ns);
bool start_courier(un_group *g);
void call_courier(un_group *g);

#endif
