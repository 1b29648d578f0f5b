//! What the name of a checkpoint says. Pure.

/// Words before a step's number, the surest first. An epoch's number is no step.
const WORDS: [&str; 6] = ["step", "iteration", "iter", "checkpoint", "ckpt", "update"];

/// Marks of a name that is not the last one.
const TEMPORARY: [&str; 8] = [".tmp", "tmp-", "tmp_", "-tmp", "_tmp", ".part", ".incomplete", ".saving"];

/// The step in a name such as `step-100`, `iter_0000100`, `epoch=0-step=100.ckpt`, or a name that is a number.
pub(super) fn step(name: &str) -> Option<u64> {
    if !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()) {
        return name.parse().ok();
    }
    let lower = name.to_ascii_lowercase();
    // A part of a file that was split: its number is no step.
    if lower.contains("-of-") {
        return None;
    }
    WORDS.iter().find_map(|word| {
        let after = &lower[lower.rfind(word)? + word.len()..];
        let after = after.trim_start_matches(['-', '_', '=', '.', ' ']);
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        after[..digits].parse().ok()
    })
}

/// Whether a file or folder of that name is one that somebody still writes.
pub(super) fn is_temporary(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.starts_with('.') || lower.ends_with('~') || TEMPORARY.iter().any(|mark| lower.contains(mark))
}
