//! When a silent worker's share may be given to another.
//!
//! Nothing may run twice, so first it must be certain that the worker's ranks have stopped. There are three ways to
//! know: kubelet says so; the node is gone from the cluster, by which an administrator says so; or the agent has
//! fenced them, which is a matter of time.
//!
//! For the last, a witness is needed: an agent of the same gang that was in touch with this control plane for
//! [`write_off_for`] while the worker was silent. Peers that ask it learn that it is, and then the peer's answer
//! keeps nobody going (`aviflow_agent::machine` has the argument from the agent's side). Both clocks run from the
//! same instants or from earlier ones there:
//!
//! ```text
//! agent      last proven contact, or the beginning of the last good round ──fence_after──▶ SIGTERM ─grace─▶ SIGKILL ─▶ gone
//! this end     it heard nothing any more, and heard the witness ─────────write_off_for──────────────────────────────────▶
//! ```
//!
//! Without a witness, as for a gang of one or where all nodes of a gang are away, the gang may be well and goes
//! on: the control plane cannot tell, and waits for kubelet's word or the node's end.
//!
//! What is not covered: an agent that alone is frozen while its ranks are not, which takes a person with a debugger
//! on that node; and processes that SIGKILL does not end, such as those in a driver that hangs.

use aviflow_agent::driver::ALIVE_MS;
use aviflow_agent::machine::BROKEN_GRACE_MS;
use aviflow_core::time::Span;
use std::time::{Duration, Instant};

/// The time that an agent has to reach anybody, where nobody says otherwise.
pub const FENCE_AFTER: Span = Span::seconds(120);

/// The shortest of such times: an agent notices after a quarter of a minute that nobody speaks to it, by when what it
/// last heard is ten seconds old, and then must find the time to ask its peers more than once.
pub const SHORTEST: Span = Span::seconds(45);

/// From SIGKILL until the last process is gone, and what two clocks differ in a few minutes.
const MARGIN: Span = Span::seconds(8);

/// Time for which a witness must have been heard and the worker not, before its ranks have certainly stopped.
#[must_use]
pub const fn write_off_for(fence_after: Span) -> Span {
    // The agent may notice late by as long as its loop waits: timers do not count while a machine sleeps.
    Span(fence_after.0 + (ALIVE_MS + BROKEN_GRACE_MS) as i64 + MARGIN.0)
}

/// How long any of the witnesses was heard while the worker was silent.
pub(crate) fn witnessed(silent: Instant, witnesses: impl Iterator<Item = (Instant, Instant)>) -> Duration {
    witnesses.map(|(from, to)| to.saturating_duration_since(from.max(silent))).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_stopped_before_their_share_is_given_away() {
        for after in [SHORTEST, FENCE_AFTER, Span::minutes(60)] {
            let latest = after.0 + i64::try_from(ALIVE_MS + BROKEN_GRACE_MS).expect("small");
            assert!(write_off_for(after).0 >= latest + 5000, "{after}");
        }
        assert_eq!(write_off_for(FENCE_AFTER), Span::seconds(140));
    }

    #[test]
    fn a_witness_counts_while_the_worker_is_silent_and_it_is_heard() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let check = |silent: u64, witnesses: &[(u64, u64)], expected: u64| {
            let found = witnessed(at(silent), witnesses.iter().map(|(from, to)| (at(*from), at(*to))));
            assert_eq!(found, Duration::from_secs(expected), "{silent} {witnesses:?}");
        };
        check(100, &[], 0);
        check(100, &[(50, 220)], 120);
        check(100, &[(150, 220)], 70);
        check(100, &[(10, 90)], 0);
        // Two halves are no whole: in between the gang may have been well by itself.
        check(100, &[(100, 160), (161, 230)], 69);
    }
}
