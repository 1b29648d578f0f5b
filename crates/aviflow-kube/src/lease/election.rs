//! What to do about a Lease that was read: a pure function of what was seen of it, and when, by one's own clock.

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use std::time::{Duration, Instant};

/// How long a lease lasts that is not renewed. Two attempts to renew it may fail before.
pub const DURATION: Duration = Duration::from_secs(6);
/// How often the holder renews it.
pub const RENEW: Duration = Duration::from_secs(2);
/// How often others look at it, so that one that is given up is soon taken.
pub const LOOK: Duration = Duration::from_secs(1);

/// The longest that a lease is waited for, whatever it says of itself.
const LONGEST: Duration = Duration::from_secs(60);

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write it: take or renew it.
    Write,
    /// Another holds it: look again.
    Wait {
        /// Who.
        holder: String,
        /// When.
        again: Duration,
    },
    /// Another took it from this one.
    Lost {
        /// Who.
        holder: String,
    },
}

/// One candidate.
#[derive(Debug)]
pub struct Election {
    me: String,
    /// What others wrote last, and since when that is known.
    seen: Option<(LeaseSpec, Instant)>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    Holds,
    Lost,
}

impl Election {
    /// A candidate that nobody else is called like, unless that one has ended.
    #[must_use]
    pub fn new(me: &str) -> Election {
        Election { me: me.to_owned(), seen: None, state: State::Waits }
    }

    /// Its name.
    #[must_use]
    pub fn me(&self) -> &str {
        &self.me
    }

    /// What to do, as the lease was read to be so (or not to be there) at `now` or a little before.
    pub fn look(&mut self, found: Option<&LeaseSpec>, now: Instant) -> Next {
        let holder = found.and_then(|spec| spec.holder_identity.as_deref()).filter(|holder| !holder.is_empty());
        let Some((spec, holder)) = found.zip(holder).filter(|(_, holder)| *holder != self.me) else {
            // Nobody has it, or this one does: also where an answer was lost to a write of its own.
            return match self.state {
                State::Waits | State::Holds => Next::Write,
                State::Lost => Next::Lost { holder: holder.unwrap_or_default().to_owned() },
            };
        };
        let holder = holder.to_owned();
        if self.state != State::Waits {
            self.state = State::Lost;
            return Next::Lost { holder };
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == spec => *since,
            _ => {
                self.seen = Some((spec.clone(), now));
                now
            }
        };
        let left = lasts(spec).saturating_sub(now.saturating_duration_since(since));
        match left.is_zero() {
            true => Next::Write,
            false => Next::Wait { holder, again: left.min(LOOK) },
        }
    }

    /// What [`Next::Write`] asked for was written.
    pub fn wrote(&mut self) {
        self.seen = None;
        self.state = State::Holds;
    }
}

/// How long a lease lasts by its own word, which is that of its holder's version.
fn lasts(spec: &LeaseSpec) -> Duration {
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).filter(|s| *s > 0);
    seconds.map_or(DURATION, Duration::from_secs).min(LONGEST)
}

/// The lease as `me` writes it over what was read. `at` is for people, and must differ from the last.
pub(super) fn written(found: Option<&LeaseSpec>, me: &str, at: MicroTime) -> LeaseSpec {
    let before = found.cloned().unwrap_or_default();
    let renews = before.holder_identity.as_deref() == Some(me);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        acquire_time: before.acquire_time.filter(|_| renews).or_else(|| Some(at.clone())),
        renew_time: Some(at),
        lease_transitions: match (found.is_some(), renews) {
            (false, _) => Some(0),
            (true, true) => before.lease_transitions,
            (true, false) => Some(before.lease_transitions.unwrap_or_default().saturating_add(1)),
        },
        // Ways to choose among candidates that are not used here.
        preferred_holder: None,
        strategy: None,
    }
}

#[cfg(test)]
mod tests;
