//! CRC-32C (Castagnoli) and the mask that TensorFlow puts over it (`tsl/lib/hash/crc32c.h`). Pure.

/// The polynomial, its bits in reverse.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc: u32, byte| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// The masked checksum.
pub(super) fn masked(data: &[u8]) -> u32 {
    crc(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Whether four bytes are the masked checksum of data.
pub(super) fn is_of(data: &[u8], sum: &[u8]) -> bool {
    sum == masked(data).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc(b"123456789"), 0xe306_9283);
    }
}
