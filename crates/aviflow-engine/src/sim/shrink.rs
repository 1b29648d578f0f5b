//! The smallest script that still fails.

use super::{Script, Violation, replay};

/// Cuts items out of a failing script as long as it goes on failing.
#[must_use]
pub fn minimal(script: &Script) -> Script {
    minimal_by(script, |s| replay(s).err())
}

/// As [`minimal`], with the run of one's own choice.
pub(crate) fn minimal_by(script: &Script, fails: impl Fn(&Script) -> Option<Violation>) -> Script {
    let mut best = script.clone();
    let mut size = best.items.len().div_ceil(2).max(1);
    loop {
        let mut at = 0;
        let mut cut_any = false;
        while at < best.items.len() {
            let mut shorter = best.clone();
            shorter.items.drain(at..(at + size).min(best.items.len()));
            if fails(&shorter).is_some() {
                best = shorter;
                cut_any = true;
            } else {
                at += size;
            }
        }
        if size == 1 && !cut_any {
            return best;
        }
        if !cut_any {
            size = size.div_ceil(2);
        }
    }
}
