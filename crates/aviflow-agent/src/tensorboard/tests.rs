use super::*;
use base64::Engine;

/// Of tensorboard's own writer: two scalars at step 10, one that is no training's, NaN at 20, and a tensor at 30.
pub(super) const TENSORBOARD: &str = "SAAAAAAAAAD+kkidCaXrgolgw9pBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2ZW50X2ZpbGVfd3JpdGVyI1MlICAAAAAAAAAAKe2pUAkAAIBC/FTZQRAKKhMKEQoKdHJhaW4vbG9zcxUAACBANxbz2SkAAAAAAAAAN/9fAAkAAIBC/FTZQRAKKhwKGgoTdHJhaW4vbGVhcm5pbmdfcmF0ZRUAAIA60Ee03iMAAAAAAAAAsJ93QwkAAIBC/FTZQRAKKhYKFAoNZXZhbC9hY2N1cmFjeRUAAAA/2+yvoiAAAAAAAAAAKe2pUAkAAABF/FTZQRAUKhMKEQoKdHJhaW4vbG9zcxUAAMB/PHTWxS4AAAAAAAAAxctX+gkAAAAAAADwPxAeKiEKHwoEbG9zc0IKCAESACoEAACgP0oLCgkKB3NjYWxhcnPQ/7cH";

/// Of tensorboardX.
const TENSORBOARD_X: &str = "GAAAAAAAAACjf0siCRwihYlgw9pBGg1icmFpbi5FdmVudDoyGTFhmCAAAAAAAAAAKe2pUAl+K4WJYMPaQRABKhMKEQoKdHJhaW4vbG9zcxUAACBAa9iElR8AAAAAAAAAUUtEGAkVMYWJYMPaQRABKhIKEAoJZ3JhZF9ub3JtFQAAAD962OKsIAAAAAAAAAAp7alQCRg1hYlgw9pBEAIqEwoRCgp0cmFpbi9sb3NzFQAAEEDYQ8D+";

const ALL: [&str; 5] = [
    "10 train/loss 2.5",
    "10 train/learning_rate 0.0009765625",
    "10 eval/accuracy 0.5",
    "20 train/loss NaN",
    "30 loss 1.25",
];

pub(super) fn bytes(text: &str) -> Vec<u8> {
    base64::engine::general_purpose::STANDARD.decode(text).expect("base64")
}

fn read(pieces: &[&[u8]]) -> (Reader, Vec<String>) {
    let (mut reader, mut scalars) = (Reader::default(), Vec::new());
    for piece in pieces {
        reader.push(piece, |s| scalars.push(format!("{} {} {}", s.step, s.tag, s.value)));
    }
    (reader, scalars)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let sums = [crc::masked(&length), crc::masked(data)].map(u32::to_le_bytes);
    [&length[..], &sums[0], data, &sums[1]].concat()
}

#[test]
fn files_of_both_writers_are_read() {
    assert_eq!(read(&[&bytes(TENSORBOARD)]).1, ALL);
    assert_eq!(read(&[&bytes(TENSORBOARD_X)]).1, ["1 train/loss 2.5", "1 grad_norm 0.5", "2 train/loss 2.25"]);
}

#[test]
fn times_are_the_writer_s() {
    let mut times = Vec::new();
    Reader::default().push(&bytes(TENSORBOARD), |scalar| times.push(scalar.unix_ms));
    assert_eq!(times[..4], [1_700_000_010_000, 1_700_000_010_000, 1_700_000_010_000, 1_700_000_020_000]);
}

#[test]
fn a_file_may_grow_in_any_pieces() {
    let file = bytes(TENSORBOARD);
    for cut in 0..=file.len() {
        assert_eq!(read(&[&file[..cut], &file[cut..]]).1, ALL, "cut at {cut}");
        // A file that ends there is read up to its last whole record.
        let (_, begun) = read(&[&file[..cut]]);
        assert!(ALL.iter().zip(&begun).all(|(all, begun)| all == begun) && begun.len() <= ALL.len());
    }
    let single: Vec<&[u8]> = file.chunks(1).collect();
    assert_eq!(read(&single).1, ALL);
}

#[test]
fn a_byte_that_changed_is_noticed_and_no_wrong_number_told() {
    let file = bytes(TENSORBOARD);
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 0x10;
        let (_, got) = read(&[&damaged]);
        assert!(got.len() < ALL.len() && got.iter().all(|scalar| ALL.contains(&scalar.as_str())), "at {at}: {got:?}");
    }
}

#[test]
fn what_is_no_event_file_is_left() {
    for other in [&b"not an event file at all"[..], &record(b"\x10\x01"), &record(b""), &[0xff; 4096]] {
        let (reader, scalars) = read(&[other, &bytes(TENSORBOARD)]);
        assert!(reader.is_broken() && scalars.is_empty() && reader.partial.is_empty(), "{other:?}");
    }
}

#[test]
fn a_large_record_is_passed_over_and_not_kept() {
    let file = bytes(TENSORBOARD_X);
    let first = 12 + 24 + 4;
    let image = record(&vec![7; 10 << 20]);
    let (mut reader, mut scalars) = (Reader::default(), 0);
    for piece in [&file[..first], &image, &file[first..]].concat().chunks(1 << 20) {
        reader.push(piece, |_| scalars += 1);
        assert!(reader.partial.capacity() <= 2 * (MAX_RECORD + HEAD + FOOT));
    }
    assert_eq!((scalars, reader.is_broken()), (3, false));
    // One that claims to be endless.
    let length = u64::MAX.to_le_bytes();
    let endless = [&length[..], &crc::masked(&length).to_le_bytes()].concat();
    let (reader, scalars) = read(&[&file, &endless, &file]);
    assert_eq!((scalars.len(), reader.partial.len()), (3, 0));
}

#[test]
fn malformed_messages_are_no_scalars() {
    let first = record(b"\x1a\x0dbrain.Event:2");
    // A tensor of two numbers; a negative step; a value without a tag; lengths that lie.
    for data in [
        &b"\x10\x01\x2a\x13\x0a\x11\x0a\x01a\x42\x0c\x08\x01\x2a\x08\0\0\xa0\x3f\0\0\xa0\x3f"[..],
        b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x2a\x0a\x0a\x08\x0a\x01a\x15\0\0\x20\x40",
        b"\x10\x01\x2a\x07\x0a\x05\x15\0\0\x20\x40",
        b"\x10\x01\x2a\x7f\x0a\x05\x15\0\0\x20\x40",
        b"\x10\x01\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x0b\x0b\x0b",
    ] {
        assert_eq!(read(&[&first, &record(data)]).1, [""; 0], "{data:?}");
    }
    // As it should be, for comparison.
    let right = b"\x10\x01\x2a\x0a\x0a\x08\x0a\x01a\x15\0\0\x20\x40";
    assert_eq!(read(&[&first, &record(right)]).1, ["1 a 2.5"]);
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_read_without_a_fault(data in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        read(&[&data]);
        read(&[&record(b"\x1a\x0dbrain.Event:2"), &record(&data)]);
    }
}
