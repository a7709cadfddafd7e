/* How a new process comes into a group: src/unisono/comm/meeting/growing.py, admit, NewcomerServer.receive,
 * NewcomerServer.tell and join_growing; SharedMemory.grow; leading.py, Leader.make_group and _admit; membership.py, follow.
 *
 * The members compare how many newcomers they expect. Rank 0 waits for the newcomer, and tells the
 * members in a second exchange whether it has come. Then all three meet as in rendezvous.pml; once all
 * have opened the new segment, rank 0 settles in the old one that it is made. A member that hears nothing
 * more of rank 0 asks there; the newcomer cannot. Any process may die or stop at any step, and any wait
 * may reach its deadline.
 */
#define BIT(rank) (1 << (rank))
#define NEWCOMER 2
#define ALL 3
#define MADE 1
#define FAILED 2
#define OPEN 1
#ifndef MOST_FAULTS
#define MOST_FAULTS 2
#endif

byte plan = 0, here = 0;    /* of the exchanges: what rank 0 says, and how often a member came */
bool visits, is_told, invited;
byte greeted = 0, opened = 0, let_go = 0, hung_up = 0; /* in the meeting: ranks, by their bits */
byte outcome = 0;           /* the word in the old segment */
bool ended = false;         /* the old group: a member of it has died */
byte has_new = 0;           /* ranks that have the new group */
byte left = 0, died = 0, stopped = 0;
byte faults = 0, over = 0;

#ifdef QUIET
#define ANYTHING skip
#define LATE false
#else
#define LATE true
#define ANYTHING if \
    :: faults < MOST_FAULTS -> faults++; died = died | BIT(me); ended = ended || me < NEWCOMER; goto ends \
    :: faults < MOST_FAULTS -> faults++; stopped = stopped | BIT(me); goto stop \
    :: skip fi
#endif

inline settle(proposed) {
    atomic { if :: outcome == 0 -> outcome = proposed :: else fi; what = outcome }
}

/* As in vote.pml: two ranks may leave it differently. */
inline exchange(all_here) {
    printf("MSC: %d exchanges\n", me);
    here++;
    if
    :: here >= all_here
    :: ended || LATE -> ended = true; goto ends
    fi
}

proctype leader() {
    byte me = 0, what;
    ANYTHING;
    exchange(2);
    ANYTHING;
    if /* NewcomerServer.receive */
    :: visits -> plan = OPEN
    :: LATE -> plan = FAILED
    :: ended -> goto ends
    fi;
    ANYTHING;
    exchange(4);
    if :: plan == FAILED -> goto ends :: else fi;
    ANYTHING;
    printf("MSC: 0 sends plan\n");
    is_told = true;
    ANYTHING;
    if
    :: greeted == (BIT(1) | BIT(NEWCOMER))
    :: hung_up || ended || LATE -> goto ends
    fi;
    printf("MSC: 0 sends invitation\n");
    printf("MSC: 0 sends invitation\n");
    invited = true;
    ANYTHING;
    if
    :: opened == (BIT(1) | BIT(NEWCOMER))
    :: hung_up || ended || LATE -> goto ends
    fi;
    ANYTHING;
    settle(MADE);
    if :: what == FAILED -> goto ends :: else fi;
    printf("MSC: 0 settles made\n");
    ANYTHING;
    printf("MSC: 0 sends go\n");
    let_go = let_go | BIT(1);
    ANYTHING;
    printf("MSC: 0 sends go\n");
    let_go = let_go | BIT(NEWCOMER);
    has_new = has_new | BIT(0);
    printf("MSC: 0 sends dismissal\n"); /* NewcomerServer.close: on a line at which nobody listens any more */
ends:
    hung_up = hung_up | BIT(0);
stop:
    over++
}

/* In the meeting, as `follow`. */
inline meet_leader() {
    ANYTHING;
    printf("MSC: %d sends hello\n", me);
    greeted = greeted | BIT(me);
    ANYTHING;
    if
    :: invited
    :: !invited && (hung_up & BIT(0)) || LATE -> goto ends
    fi;
    ANYTHING;
    opened = opened | BIT(me);
    printf("MSC: %d sends opened\n", me);
    ANYTHING
}

proctype member() {
    byte me = 1, what;
    ANYTHING;
    exchange(2);
    ANYTHING;
    exchange(4);
    if :: plan == FAILED -> goto ends :: else fi;
    meet_leader();
    if
    :: (let_go & BIT(me)) -> what = MADE
    :: !(let_go & BIT(me)) && (hung_up & BIT(0)) || LATE -> settle(FAILED)
    fi;
    if :: what == MADE -> has_new = has_new | BIT(me) :: else fi;
ends:
    hung_up = hung_up | BIT(me);
stop:
    over++
}

proctype newcomer() {
    byte me = NEWCOMER;
    ANYTHING;
    printf("MSC: 2 sends hello\n");
    visits = true;
    ANYTHING;
    if
    :: is_told
    :: !is_told && (hung_up & BIT(0)) || LATE -> goto ends
    fi;
    meet_leader();
    if
    :: (let_go & BIT(me)) -> has_new = has_new | BIT(me)
    :: !(let_go & BIT(me)) && (hung_up & BIT(0)) || LATE -> left = left | BIT(me) /* and begins anew */
    fi;
ends:
    hung_up = hung_up | BIT(me);
stop:
    over++
}

init {
    atomic { run leader(); run member(); run newcomer() }
}

#define excused (died | stopped)
/* No survivor waits for ever. */
ltl ends { <> (over == ALL) }
/* All members that live have the new group, or none has. */
ltl alike { [] ((over == ALL && !(excused & 3)) -> ((has_new & 3) == 0 || (has_new & 3) == 3)) }
/* Nobody is in a group that was not made. */
ltl only_made { [] (has_new -> outcome == MADE) }
/* A member whose new group lacks the newcomer can find out: it has ended, is stopped or has left. */
ltl told { [] ((over == ALL && (has_new & 3) && !(has_new & 4)) -> ((excused | left) & 4)) }
