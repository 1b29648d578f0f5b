//! Checkpoints that are recognised on disk, of trainings that call no hook. Pure: listings in, sightings out.
//!
//! | file | whose checkpoints | what makes one complete |
//! |---|---|---|
//! | `megatron` | Megatron-LM, Megatron-Bridge | the tracker file beside it names it |
//! | `trainer` | transformers' Trainer, TRL, LLaMA-Factory | `trainer_state.json` is whole, there are weights, nothing changes |
//! | `deepspeed` | DeepSpeed | `latest` names it, every rank's part is there, nothing changes |
//! | `dcp` | `torch.distributed.checkpoint`, torchtitan | `.metadata`, which is renamed into place last |
//! | `plain` | all that write under another name and rename | the rename came after the last write, nothing changes |
//!
//! Invariants: one that is half written is never complete, at whatever point its save is cut, and stays so if it is
//! never finished; what was there before the epoch began is never told; a checkpoint without a step in its name is
//! none.
//!
//! One worker of a gang looks, the first, as its folder is the gang's (and where it is not, rank 0 writes there what
//! makes a checkpoint complete). Hooks win: see [`crate::training`].

mod dcp;
mod deepspeed;
mod megatron;
mod name;
mod plain;
mod trainer;

use crate::hooks::Phase;
use std::collections::{BTreeMap, BTreeSet};

/// How long a checkpoint that several ranks write without a last word must be unchanged, in milliseconds.
pub const SETTLE_MS: u64 = 1000;

/// The same, where not even the number of its parts is known to be right.
pub const DOUBT_MS: u64 = 60_000;

/// Checkpoints that are remembered.
const KEPT: usize = 4096;

/// A file or folder of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Bytes of a file.
    pub size: u64,
    /// When its content changed last, in nanoseconds since 1970.
    pub modified: i64,
    /// When it was changed last in any way, its name included.
    pub changed: i64,
    /// Its number in the file system.
    pub inode: u64,
    /// Of a folder, what is in it.
    pub inside: Option<Vec<Node>>,
    /// The first and the last bytes of a file, as far as they are [`wanted`].
    pub text: Option<(Vec<u8>, Vec<u8>)>,
}

impl Node {
    /// Whether a file ends as `torch.save` ends one: with the record that ends a ZIP archive, which has 22 bytes.
    fn is_whole_archive(&self) -> bool {
        let last = self.text.as_ref().map_or(&[][..], |(_, last)| last);
        last.len().checked_sub(22).is_some_and(|at| last[at..].starts_with(b"PK\x05\x06"))
    }
}

/// What of a file is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Its first bytes and its last.
    Both,
    /// Its last bytes, if it was written within [`RECENT_MS`]: there may be many of them, and none of the older counts.
    End,
}

/// How long ago a part of a checkpoint may have been written, in milliseconds.
pub const RECENT_MS: i64 = 7_200_000;

/// What is wanted of a file of that name.
#[must_use]
pub fn wanted(name: &str) -> Option<Wanted> {
    match name {
        megatron::TRACKER | deepspeed::LATEST | trainer::STATE | dcp::METADATA => Some(Wanted::Both),
        _ if deepspeed::is_part(name) || trainer::is_random_state(name) => Some(Wanted::End),
        _ => None,
    }
}

/// What was seen of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// It began, is complete, or is gone without ever having been.
    pub phase: Phase,
    /// The step.
    pub step: u64,
    /// Its path below the folder that was listed.
    pub path: String,
    /// When it was changed last, in nanoseconds since 1970 by the file system's clock; 0 if it is gone.
    pub changed: i64,
}

/// How far a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is being written, or its writing was given up.
    Partial,
    /// It is complete if nothing of it changes for so many milliseconds.
    Settling(u64),
    /// It may be used.
    Complete,
    /// A later one is complete; whether this one ever was is not known.
    Superseded,
}

/// A checkpoint of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    step: u64,
    state: State,
}

/// What a recogniser may know beside the listing.
struct Around<'a> {
    /// What is in the same folder, by name.
    siblings: &'a [Node],
    /// Processes of the whole gang, one for each GPU; 0 if it is not known.
    gpus: u32,
    /// Files and folders that had another, temporary name before.
    renamed: &'a BTreeSet<u64>,
}

impl Around<'_> {
    fn sibling(&self, name: &str) -> Option<&Node> {
        let at = self.siblings.binary_search_by(|node| node.name.as_str().cmp(name)).ok()?;
        self.siblings.get(at)
    }
}

/// All of a checkpoint that a change would show in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Print {
    nodes: u64,
    bytes: u64,
    /// When a file of it was written last.
    written: i64,
    /// When anything of it was changed last.
    changed: i64,
    inodes: u64,
}

impl Print {
    fn of(node: &Node) -> Self {
        let mut print = Self::default();
        print.add(node);
        print
    }

    fn add(&mut self, node: &Node) {
        self.nodes += 1;
        self.bytes = self.bytes.wrapping_add(node.size);
        if node.inside.is_none() {
            self.written = self.written.max(node.modified);
        }
        self.changed = self.changed.max(node.changed);
        self.inodes = self.inodes.wrapping_add(node.inode.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        node.inside.iter().flatten().for_each(|node| self.add(node));
    }
}

#[derive(Debug)]
struct Known {
    step: u64,
    print: Print,
    /// Since when it is so.
    since: u64,
    /// It was told that it is complete, or it was there before.
    told: bool,
    begun: bool,
    /// It was told once, so that its end is no failure: old ones are removed.
    ever: bool,
}

/// The checkpoints of a folder, as one look after the other shows them.
#[derive(Debug, Default)]
pub struct Checkpoints {
    gpus: u32,
    known: BTreeMap<String, Known>,
    /// Those that are gone: a mount that blinks shows them again as they were.
    gone: BTreeMap<String, Known>,
    /// Inodes of what had a temporary name.
    temporary: BTreeSet<u64>,
    looked: bool,
    settling: bool,
}

impl Checkpoints {
    /// Of a gang with so many GPUs.
    #[must_use]
    pub fn new(gpus: u32) -> Self {
        Self { gpus, ..Self::default() }
    }

    /// Takes a listing at `now`, in milliseconds of any monotonic clock, in the order of names in each folder. The first
    /// tells what was there before.
    ///
    /// With `quiet`, nobody is left who could change anything.
    pub fn look(&mut self, listing: &[Node], now: u64, quiet: bool) -> Vec<Sighting> {
        let mut found = BTreeMap::new();
        self.find(listing, "", 0, &mut found);
        let first = !std::mem::replace(&mut self.looked, true);
        self.settling = false;
        let mut sightings = Vec::new();
        let mut say = |phase, step, path: &str, changed| {
            sightings.push(Sighting { phase, step, path: path.to_owned(), changed });
        };
        for (path, (found, print)) in &found {
            let before = self.gone.remove(path);
            let known = self.known.entry(path.clone()).or_insert_with(|| {
                let as_it_was = before.filter(|before| before.ever && before.print == *print);
                as_it_was.unwrap_or_else(|| Known {
                    step: found.step,
                    print: Print::default(),
                    since: now,
                    told: first,
                    begun: first,
                    ever: first,
                })
            });
            if known.print != *print {
                // Written anew: what was told is no more. That files go, or are renamed, says nothing.
                known.told &= first || print.written <= known.print.written;
                (known.print, known.since) = (*print, now);
            }
        }
        let settled = |known: &Known, ms: u64| quiet && ms == SETTLE_MS || now >= known.since + ms;
        // A step may be saved as several files, of which none says how many there will be.
        let open: BTreeSet<u64> = found
            .iter()
            .filter_map(|(path, (found, _))| {
                let known = self.known.get(path).filter(|known| !known.ever)?;
                let open = match found.state {
                    State::Partial => true,
                    State::Settling(ms) => !settled(known, ms),
                    State::Complete | State::Superseded => false,
                };
                open.then_some(found.step)
            })
            .collect();
        for (path, (found, print)) in &found {
            let Some(known) = self.known.get_mut(path) else { continue };
            let complete = match found.state {
                State::Complete => true,
                State::Settling(SETTLE_MS) => settled(known, SETTLE_MS) && !open.contains(&found.step),
                State::Settling(ms) => settled(known, ms),
                State::Partial | State::Superseded => false,
            };
            if complete && !known.told {
                (known.told, known.begun, known.ever) = (true, true, true);
                say(Phase::Complete, found.step, path, print.changed);
            } else if !known.begun && !matches!(found.state, State::Superseded) {
                known.begun = true;
                say(Phase::Begin, found.step, path, print.changed);
            }
            self.settling |= !known.told && matches!(found.state, State::Settling(SETTLE_MS));
        }
        self.forget(&found, &mut sightings);
        self.temporary.clear();
        temporary(listing, &mut self.temporary);
        sightings
    }

    /// Whether one would be complete if nothing changed for [`SETTLE_MS`] more.
    #[must_use]
    pub const fn is_settling(&self) -> bool {
        self.settling
    }

    /// Forgets those that are gone; one that was begun and is under no other name failed.
    fn forget(&mut self, found: &BTreeMap<String, (Found, Print)>, sightings: &mut Vec<Sighting>) {
        let gone: Vec<String> = self.known.keys().filter(|path| !found.contains_key(*path)).cloned().collect();
        for path in gone {
            let Some(known) = self.known.remove(&path) else { continue };
            let elsewhere = found.values().any(|(found, _)| found.step == known.step);
            if known.begun && !known.ever && !elsewhere {
                sightings.push(Sighting { phase: Phase::Failed, step: known.step, path, changed: 0 });
            } else {
                self.gone.insert(path, known);
            }
        }
        while self.gone.len() > KEPT {
            self.gone.pop_first();
        }
        while self.known.len() > KEPT {
            self.known.pop_first();
        }
    }

    fn find(&self, listing: &[Node], folder: &str, depth: usize, found: &mut BTreeMap<String, (Found, Print)>) {
        let around = Around { siblings: listing, gpus: self.gpus, renamed: &self.temporary };
        for node in listing {
            let path = if folder.is_empty() { node.name.clone() } else { format!("{folder}/{}", node.name) };
            let checkpoint = megatron::read(node, &around)
                .or_else(|| trainer::read(node, &around))
                .or_else(|| deepspeed::read(node, &around))
                .or_else(|| dcp::read(node))
                .or_else(|| plain::read(node, &around));
            if let Some(checkpoint) = checkpoint {
                found.insert(path, (checkpoint, Print::of(node)));
            } else if let Some(inside) = node.inside.as_ref().filter(|_| depth < 8) {
                self.find(inside, &path, depth + 1, found);
            }
        }
    }
}

/// Everything below a node, itself included.
fn all<'a>(node: &'a Node, visit: &mut impl FnMut(&'a Node)) {
    visit(node);
    for inside in node.inside.iter().flatten() {
        all(inside, visit);
    }
}

fn temporary(listing: &[Node], inodes: &mut BTreeSet<u64>) {
    for node in listing {
        if name::is_temporary(&node.name) {
            inodes.insert(node.inode);
        }
        temporary(node.inside.as_deref().unwrap_or_default(), inodes);
    }
}

#[cfg(test)]
mod tests;
