//! TensorBoard's event files: bytes in, scalars out. Pure.
//!
//! A file is a row of records (TensorFlow's `tsl/lib/io/record_writer`): the length as 8 bytes, its masked CRC-32C, the
//! data, its masked CRC-32C, all little-endian. The data is an `Event` of `event.proto`, of which only the step and the
//! scalars of its `Summary` are read: `simple_value`, or a tensor with one number, as TensorFlow 2 writes.
//!
//! Invariants: a record is read once and only when it is whole and its checksums are right; bytes may come in any
//! pieces; of a file that is no event file nothing is read, and nothing of one after a length that is wrong, as it
//! cannot be known where the next record begins; at most [`MAX_RECORD`] bytes are kept, larger records (images, graphs)
//! are passed over.

mod crc;
mod proto;

use proto::{Field, fields};

/// The largest record that is read, in bytes.
pub const MAX_RECORD: usize = 64 << 10;

/// Length and its checksum.
const HEAD: usize = 12;

/// The checksum of the data.
const FOOT: usize = 4;

/// A number of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// The step.
    pub step: u64,
    /// When it was written, in milliseconds since 1970 by the writer's clock; 0 if it does not say.
    pub unix_ms: i64,
    /// Its name, as the training gave it.
    pub tag: String,
    /// The number.
    pub value: f64,
}

/// An event file as it grows.
#[derive(Debug, Default)]
pub struct Reader {
    /// The beginning of a record.
    partial: Vec<u8>,
    /// Bytes of a record that is too large.
    pass: u64,
    /// The first record said that this is an event file.
    known: bool,
    broken: bool,
    /// Records whose data did not fit their checksum.
    damaged: u64,
}

impl Reader {
    /// Takes the next bytes of the file.
    pub fn push(&mut self, mut bytes: &[u8], mut scalar: impl FnMut(Scalar)) {
        while !self.broken && !bytes.is_empty() {
            if self.pass > 0 {
                let passed = bytes.len().min(usize::try_from(self.pass).unwrap_or(usize::MAX));
                self.pass -= passed as u64;
                bytes = &bytes[passed..];
                continue;
            }
            let wanted = self.wanted();
            let taken = bytes.len().min(wanted - self.partial.len());
            self.partial.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if self.partial.len() == wanted {
                self.step_on(&mut scalar);
            }
        }
    }

    /// Whether nothing more will be read.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Bytes up to the next decision.
    fn wanted(&self) -> usize {
        match self.length() {
            Some(length) => HEAD + length as usize + FOOT,
            None => HEAD,
        }
    }

    /// The length of the record that has begun.
    fn length(&self) -> Option<u64> {
        let bytes = self.partial.get(..8).filter(|_| self.partial.len() >= HEAD)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    }

    fn step_on(&mut self, scalar: &mut impl FnMut(Scalar)) {
        let Some(length) = self.length() else { return };
        if self.partial.len() == HEAD {
            if !crc::is_of(&self.partial[..8], &self.partial[8..]) {
                self.broken = true;
            } else if length > MAX_RECORD as u64 {
                // The first record says what the file is, and is small.
                self.broken = !self.known;
                self.pass = length.saturating_add(FOOT as u64);
                self.partial.clear();
            }
            if self.broken {
                self.partial = Vec::new();
            }
            return;
        }
        let (data, sum) = self.partial[HEAD..].split_at(length as usize);
        if !crc::is_of(data, sum) {
            self.damaged += 1;
            self.broken = !self.known;
        } else if self.known {
            event(data, scalar);
        } else {
            self.known = is_first(data);
            self.broken = !self.known;
        }
        self.partial.clear();
    }
}

/// Whether an event has the version that the first of each file has.
fn is_first(data: &[u8]) -> bool {
    fields(data).any(|field| matches!(field, (3, Field::Bytes(version)) if version.starts_with(b"brain.Event:")))
}

/// Fields of `Event`: wall_time 1, in seconds, step 2, summary 5; of `Summary`: value 1; of its `Value`: tag 1, simple_value 2, tensor 8.
fn event(data: &[u8], scalar: &mut impl FnMut(Scalar)) {
    let step = fields(data).find_map(|field| if let (2, Field::Varint(step)) = field { Some(step) } else { None });
    // A step is signed there.
    let step = step.unwrap_or(0);
    if step > i64::MAX as u64 {
        return;
    }
    let time = fields(data).find_map(|field| if let (1, Field::Fixed64(bits)) = field { Some(bits) } else { None });
    // Saturates; what is no number is 0.
    let unix_ms = time.map_or(0, |bits| (f64::from_bits(bits) * 1000.0) as i64);
    for (number, field) in fields(data) {
        let (5, Field::Bytes(summary)) = (number, field) else { continue };
        for (number, field) in fields(summary) {
            let (1, Field::Bytes(value)) = (number, field) else { continue };
            if let Some((tag, value)) = named(value) {
                scalar(Scalar { step, unix_ms, tag: tag.to_owned(), value });
            }
        }
    }
}

fn named(value: &[u8]) -> Option<(&str, f64)> {
    let (mut tag, mut number) = (None, None);
    for field in fields(value) {
        match field {
            (1, Field::Bytes(text)) => tag = std::str::from_utf8(text).ok(),
            (2, Field::Fixed32(bits)) => number = Some(f64::from(f32::from_bits(bits))),
            (8, Field::Bytes(tensor)) => number = of_tensor(tensor),
            _ => {}
        }
    }
    tag.zip(number)
}

/// The number of a tensor that has one: dtype 1, tensor_content 4, float_val 5, double_val 6.
fn of_tensor(tensor: &[u8]) -> Option<f64> {
    let (mut double, mut numbers) = (false, Vec::new());
    let mut content: &[u8] = &[];
    for field in fields(tensor) {
        match field {
            (1, Field::Varint(dtype)) => double = dtype == 2,
            (4..=6, Field::Bytes(bytes)) => content = bytes,
            (5, Field::Fixed32(bits)) => numbers.push(f64::from(f32::from_bits(bits))),
            (6, Field::Fixed64(bits)) => numbers.push(f64::from_bits(bits)),
            _ => {}
        }
    }
    let packed = if double {
        <[u8; 8]>::try_from(content).ok().map(f64::from_le_bytes)
    } else {
        <[u8; 4]>::try_from(content).ok().map(|bytes| f64::from(f32::from_le_bytes(bytes)))
    };
    match (packed, numbers.as_slice()) {
        (Some(number), []) => Some(number),
        (None, [number]) if content.is_empty() => Some(*number),
        _ => None,
    }
}

/// An event file with steps 10, 20 and 30.
#[cfg(test)]
pub(crate) fn sample() -> Vec<u8> {
    tests::bytes(tests::TENSORBOARD)
}

#[cfg(test)]
mod tests;
