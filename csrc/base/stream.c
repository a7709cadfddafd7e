/* Streams: user memory, contiguous, strided or in many tensors, as one sequence of bytes. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "base/group.h"
#include "base/stream.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* Copy around the cache, to memory that is not read soon. Ordinary stores would first fetch
 * every line that they overwrite; Arm's cores detect and skip that themselves. */
static void copy_around_cache(char *to, const char *from, size_t bytes) {
#if defined(__x86_64__)
    size_t lead = (uintptr_t)to % 16 ? 16 - (uintptr_t)to % 16 : 0;
    if (bytes < 4096) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, lead);
    to += lead, from += lead, bytes -= lead;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(to, from, bytes);
}

/* Copy to two buffers, reading once. */
void copy_twice(char *restrict near, char *restrict far, const char *restrict from, size_t bytes) {
    typedef unsigned char vector __attribute__((vector_size(16), aligned(1)));
    size_t done = 0;
    for (; done + 64 <= bytes; done += 64)
        for (size_t i = done; i < done + 64; i += 16) {
            vector part = *(const vector *)(from + i);
            *(vector *)(near + i) = part;
            *(vector *)(far + i) = part;
        }
    memcpy(near + done, from + done, bytes - done);
    memcpy(far + done, from + done, bytes - done);
}

/* Copy elements between a row and memory that is `stride` apart. */
static void copy_row(char *row, char *memory, ptrdiff_t stride, size_t items, size_t item_bytes,
                     bool to_memory) {
    for (size_t i = 0; i < items; i++) {
        if (to_memory)
            memcpy(memory, row, item_bytes);
        else
            memcpy(row, memory, item_bytes);
        row += item_bytes;
        memory += stride;
    }
}

static void copy_items(char *row, char *memory, ptrdiff_t stride, size_t items, size_t item_bytes,
                       bool to_memory) {
    if (stride == (ptrdiff_t)item_bytes) {
        copy_row(row, memory, 0, 1, items * item_bytes, to_memory);
        return;
    }
    switch (item_bytes) { /* constants let the compiler unroll the copies */
    case 1: copy_row(row, memory, stride, items, 1, to_memory); break;
    case 2: copy_row(row, memory, stride, items, 2, to_memory); break;
    case 4: copy_row(row, memory, stride, items, 4, to_memory); break;
    case 8: copy_row(row, memory, stride, items, 8, to_memory); break;
    default: copy_row(row, memory, stride, items, item_bytes, to_memory); break;
    }
}

/* Copy `bytes` of a strided view, from `offset` in its flattened order on. */
static void copy_strided(const un_view *view, size_t offset, char *row, size_t bytes,
                         bool to_memory) {
    const un_layout *layout = view->layout;
    const struct un_dim *inner = &layout->dim[layout->dims - 1];
    size_t item = (view->first_byte + offset) / layout->item_bytes;
    size_t left = bytes / layout->item_bytes;
    while (left) {
        char *memory = view->data;
        size_t index = item;
        for (int d = layout->dims - 1; d >= 0; d--) {
            memory += (ptrdiff_t)(index % layout->dim[d].length) * layout->dim[d].stride_bytes;
            index /= layout->dim[d].length;
        }
        size_t items = inner->length - item % inner->length;
        if (items > left) items = left;
        copy_items(row, memory, inner->stride_bytes, items, layout->item_bytes, to_memory);
        row += items * layout->item_bytes;
        item += items;
        left -= items;
    }
}

/* The view that holds byte `offset`: the last one that starts at or before it. */
static const un_view *find_view(const un_stream *s, size_t offset) {
    size_t low = 0, high = s->count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (s->views[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    return &s->views[low];
}

/* The address of these bytes, or NULL if they are not contiguous. */
char *stream_direct(const un_stream *s, size_t offset, size_t bytes) {
    const un_view *view = find_view(s, offset);
    if (view->layout || offset - view->start + bytes > view->bytes) return NULL;
    return view->data + (offset - view->start);
}

bool stream_is_new(const un_stream *s) {
    const char *middle = s->bytes ? stream_direct(s, s->bytes / 2, 1) : NULL;
    unsigned char resident = 1;
    return middle &&
           !mincore((void *)((uintptr_t)middle / PAGE_BYTES * PAGE_BYTES), 1, &resident) &&
           !(resident & 1);
}

/* Page faults take longer than the copy itself. Kernels before 5.14 refuse. */
void make_pages(const un_stream *s, size_t offset, size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
    uintptr_t at = (uintptr_t)stream_direct(s, offset, bytes), first = round_up(at, PAGE_BYTES);
    if (at && first + PAGE_BYTES <= at + bytes)
        madvise((void *)first, (at + bytes - first) / PAGE_BYTES * PAGE_BYTES, MADV_POPULATE_WRITE);
#else
    (void)s, (void)offset, (void)bytes;
#endif
}

void stream_read(char *to, const un_stream *s, size_t offset, size_t bytes) {
    for (const un_view *view = find_view(s, offset); bytes; view++) {
        size_t inside = offset - view->start;
        size_t part = view->bytes - inside < bytes ? view->bytes - inside : bytes;
        if (view->layout)
            copy_strided(view, inside, to, part, false);
        else
            memcpy(to, view->data + inside, part);
        to += part, offset += part, bytes -= part;
    }
}

void stream_write(const un_stream *s, size_t offset, const char *from, size_t bytes, bool large) {
    for (const un_view *view = find_view(s, offset); bytes; view++) {
        size_t inside = offset - view->start;
        size_t part = view->bytes - inside < bytes ? view->bytes - inside : bytes;
        if (view->layout)
            copy_strided(view, inside, (char *)(uintptr_t)from, part, true);
        else if (large)
            copy_around_cache(view->data + inside, from, part);
        else
            memcpy(view->data + inside, from, part);
        from += part, offset += part, bytes -= part;
    }
}
