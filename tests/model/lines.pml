/* A control line between two hosts: src/unisono/comm/hosts/control_line.py, ControlLines.send, close,
 * _say_goodbye, _read, _forget, _lose and _drop_silent_lines; links.py hears of it by _on_left and
 * _on_lost.
 *
 * Each rank may send, leaves at some time with a goodbye, and waits until the other hangs up or has had
 * its time. Either may die at any step (its kernel hangs up), or the cable is cut (nothing arrives any
 * more, nor a hang-up). Whoever has heard nothing of the other kernel for long enough gives it up.
 */
mtype = { message, goodbye, hangup };

#define OTHER (1 - me)
chan to[2] = [4] of { mtype };
bool cut = false, has_left[2], has_died[2], is_over[2];
bool heard_left[2], heard_lost[2]; /* of the other */
bool stays = false;                /* rank 0 neither leaves nor dies */

#ifdef QUIET
#define FAULTS false
#else
#define FAULTS true
#endif
#define MAY_END (FAULTS && !(me == 0 && stays))

inline put(what) { /* the kernel takes it; where it goes is the network's affair */
    atomic {
        if
        :: !cut && nfull(to[OTHER]) -> to[OTHER] ! what
        :: else
        fi
    }
}

proctype rank(byte me) {
    byte sent = 0;
    mtype what;
    bool line = true, leaving = false;
    do
    :: !leaving && sent < 1 -> sent++; printf("MSC: %d sends message\n", me); put(message)
    :: !leaving && (MAY_END || (!FAULTS && sent == 1 && (me == 0 || heard_left[me]))) ->
        leaving = true; /* _is_closing */
        if
        :: line -> has_left[me] = true; printf("MSC: %d sends goodbye\n", me); put(goodbye)
        :: else
        fi
    :: MAY_END -> has_died[me] = true; break
    :: line && nempty(to[me]) ->
        to[me] ? what;
        if
        :: what == message
        :: what == goodbye -> printf("MSC: %d hears goodbye\n", me);
            heard_left[me] = true; line = false; put(hangup)
        :: what == hangup -> line = false;
            if :: !leaving -> heard_lost[me] = true :: else fi
        fi
    :: line && cut && empty(to[me]) -> line = false; /* silence: by keepalive, or _drop_silent_lines */
        if :: !leaving -> heard_lost[me] = true :: else fi
    :: leaving && (!line || FAULTS) -> break /* the other has hung up, or has had _GOODBYE_S */
    od;
    if
    :: line -> put(hangup)
    :: else
    fi;
    is_over[me] = true
}

init {
    if
    :: FAULTS -> stays = true
    :: true
    fi;
    atomic { run rank(0); run rank(1) };
    if
    :: FAULTS -> cut = true
    :: true
    fi
}

/* A rank that has taken its leave is not called lost, unless the cable was cut. */
ltl leave_is_no_loss {
    [] ((heard_lost[0] -> (has_died[1] || cut)) && (heard_lost[1] -> (has_died[0] || cut)))
}
/* Nobody hears both of one rank. */
ltl one_ending { [] (!(heard_left[0] && heard_lost[0]) && !(heard_left[1] && heard_lost[1])) }
/* Who stays hears of the other's end, however it came. */
ltl ends_are_heard { [] ((stays && is_over[1]) -> <> (heard_left[0] || heard_lost[0])) }
