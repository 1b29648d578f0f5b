//! Fixed-point arithmetic: 32 bits after the point. The core has no floating-point numbers,
//! whose results differ between machines.

/// 1.
pub const ONE: u64 = 1 << 32;

/// The natural logarithm of 2.
pub const LN_2: u64 = 2_977_044_472;

/// 2^(−1/2), 2^(−1/4), … 2^(−1/2^32).
const ROOTS: [u64; 32] = roots();

/// Integer square root.
const fn sqrt(n: u128) -> u128 {
    if n < 2 {
        return n;
    }
    let mut x = n;
    let mut y = x.div_ceil(2);
    while y < x {
        x = y;
        y = (x + n / x) / 2;
    }
    x
}

const fn roots() -> [u64; 32] {
    let mut out = [0; 32];
    // With 62 bits, so that the last roots are exact to 32.
    let mut root: u128 = 1 << 61;
    let mut i = 0;
    while i < 32 {
        root = sqrt(root << 62);
        out[i] = (root >> 30) as u64;
        i += 1;
    }
    out
}

/// 2^(−past/half_life).
#[must_use]
pub fn half_to(past: u64, half_life: u64) -> u64 {
    let half_life = half_life.max(1);
    let whole = past / half_life;
    if whole >= 32 {
        return 0;
    }
    // The part after the point, 32 bits.
    let part = u64::try_from((u128::from(past % half_life) << 32) / u128::from(half_life)).unwrap_or(0);
    let mut value = u128::from(ONE);
    for (i, root) in ROOTS.iter().enumerate() {
        if part >> (31 - i) & 1 == 1 {
            value = (value * u128::from(*root)) >> 32;
        }
    }
    u64::try_from(value >> whole).unwrap_or(0)
}

/// log₂(max(1, n)), in 256ths.
#[must_use]
pub fn log2_256(n: u64) -> i64 {
    let n = n.max(1);
    let whole = n.ilog2();
    // The part between 1 and 2, 32 bits after the point; squaring it gives one bit of the logarithm after the other.
    let mut x = u64::try_from((u128::from(n) << 32) >> whole).unwrap_or(ONE);
    let mut bits = 0;
    for _ in 0..8 {
        let square = (u128::from(x) * u128::from(x)) >> 32;
        bits <<= 1;
        if square >= u128::from(2 * ONE) {
            bits |= 1;
            x = u64::try_from(square >> 1).unwrap_or(ONE);
        } else {
            x = u64::try_from(square).unwrap_or(ONE);
        }
    }
    (i64::from(whole) << 8) | bits
}

/// n · 2^(e/256).
#[must_use]
pub fn scale_256(n: u64, e: i64) -> u64 {
    // 2^(e/256) = 2^⌈e/256⌉ · 2^−(rest/256).
    let up = e.div_euclid(256) + i64::from(e.rem_euclid(256) > 0);
    let rest = (up * 256 - e).unsigned_abs();
    let down = (u128::from(n) * u128::from(half_to(rest, 256))) >> 32;
    let scaled = if up >= 0 {
        down.checked_shl(u32::try_from(up).unwrap_or(u32::MAX))
    } else {
        down.checked_shr(u32::try_from(-up).unwrap_or(u32::MAX))
    };
    let most = u128::from(u64::MAX >> 2);
    u64::try_from(scaled.unwrap_or(if up >= 0 { most } else { 0 }).min(most)).unwrap_or(u64::MAX >> 2)
}

/// ⌊log₂(max(1, a / b))⌋.
#[must_use]
pub fn log2_ratio(a: u64, b: u64) -> u32 {
    (a / b.max(1)).max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_agree_with_floating_point() {
        for past in [0u64, 1, 500, 999, 1000, 1500, 2718, 10_000, 31_999] {
            let exact = 2f64.powf(-(past as f64) / 1000.0);
            let got = half_to(past, 1000) as f64 / ONE as f64;
            assert!((exact - got).abs() < 1e-8, "{past}: {exact} {got}");
        }
        assert_eq!(half_to(32_000, 1000), 0);
        assert_eq!(half_to(1000, 1000), ONE / 2);
        let ln2 = (std::f64::consts::LN_2 * ONE as f64) as u64;
        assert!(LN_2.abs_diff(ln2) <= 1);
    }

    #[test]
    fn logarithms_agree_with_floating_point() {
        for n in [1u64, 2, 3, 7, 100, 12_345, 1 << 40] {
            let exact = (n as f64).log2() * 256.0;
            assert!((log2_256(n) as f64 - exact).abs() < 1.5, "{n}");
        }
        for e in [-700i64, -256, -1, 0, 1, 100, 256, 1000] {
            let exact = 1e6 * 2f64.powf(e as f64 / 256.0);
            assert!((scale_256(1_000_000, e) as f64 - exact).abs() <= exact * 1e-6 + 1.0, "{e}");
        }
    }

    #[test]
    fn levels_double() {
        let levels: Vec<u32> = [0, 1, 7, 8, 15, 16, 32].map(|h| log2_ratio(h, 4)).to_vec();
        assert_eq!(levels, [0, 0, 0, 1, 1, 2, 3]);
    }
}
