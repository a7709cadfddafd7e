/* How a new process comes into a group: src/unisono/comm/hosts/growing.py, grow, join_growing and
 * Growth.pass_through; meeting/roster.py, agree; anywhere.py, connect_once; leading.py, Leader._admit;
 * membership.py, follow.
 *
 * Rank 0 announces on a board that the group grows. The members compare how many newcomers they expect.
 * Then all, with the newcomer, publish an entry each, and agree once they see all entries. They meet as
 * in rendezvous.pml; once all have opened the new segment, rank 0 settles on the board that it is made.
 * One that hears nothing more of rank 0 asks there. Rank 0 removes the board once nothing was made, or
 * all have heard that it was. Any process may die or stop at any step, and any wait may reach its deadline.
 */
#define BIT(rank) (1 << (rank))
#define NEWCOMER 2
#define ALL 3
#define EVERYONE 7
#define MADE 1
#define FAILED 2
#ifndef MOST_FAULTS
#define MOST_FAULTS 2
#endif

bool announced = false, removed = false;            /* of the board */
byte published = 0, agreed = 0, informed = 0;       /* on it: ranks, by their bits */
byte outcome = 0;                                   /* on it */
byte opened = 0;                                    /* in the meeting: ranks, by their bits */
byte here = 0;                                      /* members that have come to the exchange */
bool ended = false;                                 /* the old group: a member of it has died */
byte has_new = 0;                                   /* ranks that have the new group */
byte died = 0, stopped = 0;
byte faults = 0, over = 0;

#ifdef QUIET
#define ANYTHING skip
#define LATE false
#else
#define LATE true
#define ANYTHING if \
    :: faults < MOST_FAULTS -> faults++; died = died | BIT(me); ended = ended || me < NEWCOMER; goto ends \
    :: faults < MOST_FAULTS -> faults++; stopped = stopped | BIT(me); goto ends \
    :: skip fi
#endif

#define WILL_FAIL (removed || (ended && me < NEWCOMER) || LATE)

/* What is settled first counts; on a board that is removed, nothing can be made any more. */
inline settle(proposed) {
    atomic {
        if
        :: removed -> what = FAILED
        :: else -> if :: outcome == 0 -> outcome = proposed :: else fi; what = outcome
        fi
    }
}

proctype take_part(byte me) {
    byte what;
    ANYTHING;
    if
    :: me == 0 -> printf("MSC: 0 announces\n"); announced = true
    :: me == NEWCOMER -> if :: announced && !removed :: LATE -> goto ends fi
    :: else
    fi;
    ANYTHING;
    if
    :: me < NEWCOMER ->
        printf("MSC: %d exchanges\n", me);
        here++;
        if
        :: here == NEWCOMER
        :: ended || LATE -> ended = true; goto fails
        fi
    :: else
    fi;
    ANYTHING;
    printf("MSC: %d publishes\n", me);
    published = published | BIT(me);
    if :: published == EVERYONE :: WILL_FAIL -> goto fails fi;
    ANYTHING;
    printf("MSC: %d agrees\n", me);
    agreed = agreed | BIT(me);
    if :: agreed == EVERYONE :: WILL_FAIL -> goto fails fi;
    ANYTHING;
    printf("MSC: %d meets\n", me);
    opened = opened | BIT(me);
    ANYTHING;
    if
    :: me == 0 ->
        if
        :: opened == EVERYONE -> settle(MADE)
        :: died || ended || LATE -> settle(FAILED)
        fi
    :: else ->
        if
        :: outcome == MADE && !removed -> what = MADE
        :: died || WILL_FAIL -> settle(FAILED) /* or hears that it is made */
        fi
    fi;
    if :: what == FAILED -> goto fails :: else fi;
    if :: me == 0 -> printf("MSC: 0 settles made\n") :: else fi;
    has_new = has_new | BIT(me);
    informed = informed | BIT(me);
    ANYTHING;
    if
    :: me > 0 || died || LATE -> goto ends
    :: me == 0 && informed == EVERYONE -> removed = true; goto ends
    fi;
fails:
    if :: me == 0 -> removed = true :: else fi;
ends:
    over++
}

init {
    atomic { run take_part(0); run take_part(1); run take_part(2) }
}

#define excused (died | stopped)
/* No survivor waits for ever. */
ltl ends { <> (over == ALL) }
/* All members that live have the new group, or none has. */
ltl alike { [] ((over == ALL && !(excused & 3)) -> ((has_new & 3) == 0 || (has_new & 3) == 3)) }
/* Nobody is in a group that was not made. */
ltl only_made { [] (has_new -> outcome == MADE) }
/* If the members have the new group, so has the newcomer, unless it has ended or is stopped. */
ltl told { [] ((over == ALL && (has_new & 3) == 3) -> ((has_new | excused) & 4)) }
