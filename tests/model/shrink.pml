/* How the survivors of a group go on: src/unisono/comm/meeting/survivors.py, go_on, _attempt,
 * _await_choice, _await_outcome and Attempt; outcome.py, Outcome.wait; src/unisono/comm/hosts/going_on.py, shrink, _boards,
 * StoreVote._attested and StoreVote.refusal.
 *
 * Three ranks on three hosts agree on a board, a store with compare-and-swap. A rank that cannot reach
 * the first board any more turns to a second one, unless it has begun to meet. Any rank may die or stop at
 * any step, or lose a board; any wait may reach its deadline. Deaths are attested by a kernel; a rank of
 * which nothing is heard is silent, and only a majority may leave it out.
 */
#define BIT(rank) (1 << (rank))
#define RANKS 3
#define ATTEMPTS 2
#define AT(board, attempt) ((board) * (ATTEMPTS + 1) + (attempt))
#define SAID(board, rank) said[(board) * RANKS + (rank)]
#define WITHDRAWN 9
#define CHOSEN 8   /* a bit of every choice */
#define REFUSED 16 /* a bit of some */
#define MADE 1
#define FAILED 2
#define ALL 3
#ifndef MOST_FAULTS
#define MOST_FAULTS 2
#endif

byte said[6];       /* on each board, to which attempt a rank has come */
byte choice[6];     /* on each board, of each attempt: its members, by their bits */
byte outcome[6];
byte opened[6];     /* who has opened the segment of an attempt */
byte group_of[3];   /* which attempt gave a rank its new group */
byte died = 0, stopped = 0, faults = 0, over = 0, refused = 0;

#define ALL_CAME (SAID(board, 0) >= attempt && SAID(board, 1) >= attempt && SAID(board, 2) >= attempt)
#define COUNT(bits) (((bits) & 1) + (((bits) >> 1) & 1) + (((bits) >> 2) & 1))

#ifdef QUIET
#define ANYTHING skip
#define LATE false
#define LOST false
#else
#define LATE true
#define LOST (faults < MOST_FAULTS)
#define ANYTHING if \
    :: faults < MOST_FAULTS -> faults++; died = died | BIT(me); goto ends \
    :: faults < MOST_FAULTS -> faults++; stopped = stopped | BIT(me); goto ends \
    :: skip fi
#endif

inline settle(proposed) {
    atomic { if :: outcome[AT(board, attempt)] == 0 -> outcome[AT(board, attempt)] = proposed :: else fi }
}

/* What a rank sees, and what it proposes. */
inline look_around() {
    present = 0; silent = 0; i = 0;
    do
    :: i < RANKS ->
        if
        :: SAID(board, i) == WITHDRAWN || (i != me && (died & BIT(i)))
        :: else ->
            if
            :: SAID(board, i) >= attempt -> present = present | BIT(i)
            :: else -> silent = silent | BIT(i)
            fi
        fi;
        i++
    :: else -> break
    od;
    i = 0;
    if
    :: silent && COUNT(present) <= COUNT(silent) -> members = CHOSEN | REFUSED
    :: else -> members = CHOSEN | present
    fi;
    present = 0
}

proctype rank(byte me) {
    byte board = 0, attempt = 1, i, present, silent, members;
come:
    printf("MSC: %d says %d\n", me, attempt);
    SAID(board, me) = attempt;
    ANYTHING;
wait_for_choice:
    if
    :: LOST -> faults++; goto lost
    :: atomic {
        choice[AT(board, attempt)] == 0 && (LATE || ALL_CAME) -> look_around(); silent = 0;
        choice[AT(board, attempt)] = members
    }
    :: atomic { choice[AT(board, attempt)] -> members = choice[AT(board, attempt)] }
    fi;
    if :: members & REFUSED -> refused = refused | BIT(me); goto ends :: else fi;
    members = members & 7;
    if
    :: !(members & BIT(me)) ->
        if /* _await_outcome */
        :: outcome[AT(board, attempt)]
        :: (members & died) == members || LATE -> settle(FAILED)
        :: LOST -> faults++; goto lost
        fi;
        if
        :: outcome[AT(board, attempt)] == MADE -> refused = refused | BIT(me); goto ends
        :: else -> goto next
        fi
    :: else
    fi;
    opened[AT(board, attempt)] = opened[AT(board, attempt)] | BIT(me);
    ANYTHING;
    if
    :: !(members & (BIT(me) - 1)) -> /* the first of them */
        if
        :: opened[AT(board, attempt)] == members -> settle(MADE)
        :: (members & died) || outcome[AT(board, attempt)] || LATE -> settle(FAILED)
        :: LOST -> faults++; refused = refused | BIT(me); goto ends
        fi
    :: else ->
        if
        :: outcome[AT(board, attempt)]
        :: (members & died) || LATE -> settle(FAILED)
        :: LOST -> faults++; refused = refused | BIT(me); goto ends
        fi
    fi;
    if
    :: outcome[AT(board, attempt)] == MADE ->
        group_of[me] = AT(board, attempt);
        printf("MSC: %d goes on\n", me);
        goto ends
    :: else
    fi;
next:
    if
    :: attempt < ATTEMPTS - board -> attempt++; goto come
    :: else -> SAID(board, me) = WITHDRAWN; goto ends
    fi;
lost:
    if
    :: board == 0 -> board = 1; attempt = 1; goto come
    :: else -> refused = refused | BIT(me)
    fi;
ends:
    atomic { members = 0; silent = 0; board = 0; attempt = 0; over++ }
}

init {
    atomic { run rank(0); run rank(1); run rank(2) }
}

#define alive(rank) (!(died & BIT(rank)))
#define apart(a, b) (group_of[a] && group_of[b] && group_of[a] != group_of[b] && alive(a) && alive(b))
/* No survivor waits for ever. */
ltl ends { <> (over == ALL) }
/* There are never two groups of ranks that live, whoever was silent or has turned to another board. */
ltl one_group { [] !(apart(0, 1) || apart(0, 2) || apart(1, 2)) }
/* Whoever has a new group was chosen for it, and all of its members opened it. */
#define whole(rank) (!group_of[rank] || ((choice[group_of[rank]] & BIT(rank)) && \
    opened[group_of[rank]] == (choice[group_of[rank]] & 7)))
ltl only_chosen { [] (whole(0) && whole(1) && whole(2)) }
