//! "Did you mean": the nearest of the words that are possible.

/// The nearest of `known` to `word`, if one is near enough to be what was meant.
///
/// Case, `-` and `_` do not count, so `gpus_per_node` finds `gpusPerNode`. Of equally near
/// words the one that begins most alike wins, then the first of `known`.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = fold(word);
    // A third of the word may be wrong; of a short word one letter.
    let limit = (plain.chars().count() / 3).clamp(1, 4);
    let mut best: Option<(usize, usize, &str)> = None;
    for candidate in known {
        let folded = fold(candidate);
        let distance = strsim::osa_distance(&plain, &folded);
        let common = plain.chars().zip(folded.chars()).take_while(|(a, b)| a == b).count();
        // `success` is far from `succeeded`, but begins like it.
        let begins = common >= 4 && common * 2 >= plain.chars().count();
        let rank = (distance, usize::MAX - common);
        if (distance <= limit || begins) && best.is_none_or(|(d, c, _)| rank < (d, c)) {
            best = Some((rank.0, rank.1, candidate));
        }
    }
    best.map(|(_, _, candidate)| candidate)
}

fn fold(word: &str) -> String {
    word.chars().filter(|c| !matches!(c, '-' | '_' | ' ')).flat_map(char::to_lowercase).collect()
}

/// `1 node`, `2 nodes`.
#[must_use]
pub fn count(n: u64, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

/// `a`, `b` or `c`.
#[must_use]
pub fn one_of<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = words.into_iter().map(|w| format!("`{w}`")).collect();
    match quoted.split_last() {
        None => String::new(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["nodes", "gpusPerNode", "gpuType", "run", "env"];
        assert_eq!(nearest("node", known), Some("nodes"));
        assert_eq!(nearest("gpus_per_node", known), Some("gpusPerNode"));
        assert_eq!(nearest("GPUTYPE", known), Some("gpuType"));
        assert_eq!(nearest("rnu", known), Some("run"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest("node", ["code", "nodes"]), Some("nodes"));
        assert_eq!(nearest("success", ["ended", "succeeded"]), Some("succeeded"));
        assert_eq!(one_of(["a", "b", "c"]), "`a`, `b` or `c`");
    }
}
