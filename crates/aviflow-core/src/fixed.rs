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
            value = value * u128::from(*root) >> 32;
        }
    }
    u64::try_from(value >> whole).unwrap_or(0)
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
    fn levels_double() {
        let levels: Vec<u32> = [0, 1, 7, 8, 15, 16, 32].map(|h| log2_ratio(h, 4)).to_vec();
        assert_eq!(levels, [0, 0, 0, 1, 1, 2, 3]);
    }
}
