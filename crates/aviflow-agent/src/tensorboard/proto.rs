//! The wire format of Protocol Buffers, as far as it takes to find a field. Pure.
//!
//! What is malformed ends the row of fields; what came before it stands.

/// A field's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field<'a> {
    /// A number.
    Varint(u64),
    /// Eight bytes.
    Fixed64(u64),
    /// Text, bytes, a message or packed numbers.
    Bytes(&'a [u8]),
    /// Four bytes.
    Fixed32(u32),
}

/// The fields of a message by their numbers, in their order.
pub(super) fn fields(mut data: &[u8]) -> impl Iterator<Item = (u64, Field<'_>)> {
    std::iter::from_fn(move || {
        let key = varint(&mut data)?;
        let field = match key & 7 {
            0 => Field::Varint(varint(&mut data)?),
            1 => Field::Fixed64(u64::from_le_bytes(take(&mut data, 8)?.try_into().ok()?)),
            2 => {
                let length = usize::try_from(varint(&mut data)?).ok()?;
                Field::Bytes(take(&mut data, length)?)
            }
            5 => Field::Fixed32(u32::from_le_bytes(take(&mut data, 4)?.try_into().ok()?)),
            // Groups, which nobody writes any more.
            _ => return None,
        };
        Some((key >> 3, field))
    })
}

fn take<'a>(data: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = data.split_at_checked(length)?;
    *data = rest;
    Some(taken)
}

fn varint(data: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for (n, byte) in data.iter().take(10).enumerate() {
        number |= u64::from(byte & 0x7f).checked_shl(7 * n as u32)?;
        if byte & 0x80 == 0 {
            *data = &data[n + 1..];
            return Some(number);
        }
    }
    None
}
