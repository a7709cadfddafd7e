/* Matching: messages that arrived before their receives, and receives that wait for their messages.
 *
 * Both are in tables by source and tag. Entries with the same source and tag stay in order: they
 * are always in the same bucket, and new ones go to the end.
 */
#include <stdlib.h>

#include "local/messages.h"

static size_t bucket_of(size_t size, int source, int64_t tag) {
    uint64_t hash = ((uint64_t)tag ^ (uint64_t)source << 48) * 0x9e3779b97f4a7c15u;
    return (size_t)(hash >> 32) & (size - 1);
}

static void append(match_bucket *buckets, size_t size, un_match *match) {
    match_bucket *b = &buckets[bucket_of(size, match->source, match->tag)];
    match->next = NULL;
    if (b->last)
        b->last->next = match;
    else
        b->first = match;
    b->last = match;
}

static match_bucket *buckets_of(const match_table *t) {
    return t->buckets ? t->buckets : (match_bucket *)(uintptr_t)t->few;
}

static size_t size_of(const match_table *t) { return t->buckets ? t->size : FEW_BUCKETS; }

/* Without memory the table keeps its size, and gets slower. */
static void grow(match_table *t) {
    size_t size = size_of(t), larger = 4 * size;
    match_bucket *buckets = calloc(larger, sizeof *buckets);
    if (!buckets) return;
    for (size_t i = 0; i < size; i++)
        for (un_match *match = buckets_of(t)[i].first, *next; match; match = next) {
            next = match->next;
            append(buckets, larger, match);
        }
    free(t->buckets);
    t->buckets = buckets;
    t->size = larger;
}

void add_match(match_table *t, un_match *match) {
    if (t->count >= size_of(t)) grow(t);
    append(buckets_of(t), size_of(t), match);
    t->count++;
}

static bool fits(const un_match *match, int source, int64_t tag) {
    return match->tag == tag && match->source == source;
}

un_match *find_match(const match_table *t, int source, int64_t tag) {
    if (!t->count) return NULL;
    un_match *match = buckets_of(t)[bucket_of(size_of(t), source, tag)].first;
    while (match && !fits(match, source, tag)) match = match->next;
    return match;
}

un_match *take_match(match_table *t, int source, int64_t tag) {
    if (!t->count) return NULL;
    match_bucket *b = &buckets_of(t)[bucket_of(size_of(t), source, tag)];
    un_match *match = b->first, *before = NULL;
    while (match && !fits(match, source, tag)) {
        before = match;
        match = match->next;
    }
    if (!match) return NULL;
    if (before)
        before->next = match->next;
    else
        b->first = match->next;
    if (b->last == match) b->last = before;
    t->count--;
    return match;
}

un_match *oldest_from(const match_table *t, int source) {
    un_match *oldest = NULL;
    for (size_t i = 0; t->count && i < size_of(t); i++)
        for (un_match *match = buckets_of(t)[i].first; match; match = match->next)
            if ((source < 0 || match->source == source) &&
                (!oldest || match->number < oldest->number))
                oldest = match;
    return oldest;
}

void clear_matches(match_table *t, bool frees) {
    for (size_t i = 0; frees && t->count && i < size_of(t); i++)
        for (un_match *match = buckets_of(t)[i].first, *next; match; match = next) {
            next = match->next;
            free(match);
        }
    free(t->buckets);
    *t = (match_table){0};
}
