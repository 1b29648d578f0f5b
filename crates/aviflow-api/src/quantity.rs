//! Amounts of memory: `200Gi`, `64Mi`, `1.5Ti`. Binary units only, as what else they may mean differs.

use std::str::FromStr;

/// An amount in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(pub u64);

/// Why a text is no amount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// A number alone.
    #[error("`{0}` has no unit")]
    NoUnit(String),
    /// A unit that is none, or that is read differently: `GB`, `G`, `gi`.
    #[error("`{unit}` is no unit of memory here")]
    Unit {
        /// The number.
        number: String,
        /// The unit.
        unit: String,
    },
    /// Anything else.
    #[error("`{0}` is not an amount of memory")]
    Malformed(String),
    /// More than can be.
    #[error("`{0}` is more than any machine has")]
    TooLarge(String),
}

impl QuantityError {
    /// What to write instead.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            QuantityError::NoUnit(number) => format!("write `{number}Gi`, or another of Ki, Mi, Gi, Ti"),
            QuantityError::Unit { number, unit } => {
                let first = unit.chars().next().unwrap_or_default().to_ascii_uppercase();
                match first {
                    'K' | 'M' | 'G' | 'T' | 'P' => format!("write `{number}{first}i`"),
                    _ => format!("write `{number}Gi`, or another of Ki, Mi, Gi, Ti"),
                }
            }
            QuantityError::Malformed(_) | QuantityError::TooLarge(_) => {
                "write for example `200Gi` or `512Mi`".to_owned()
            }
        }
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Quantity, QuantityError> {
        let t = text.trim();
        let malformed = || QuantityError::Malformed(t.to_owned());
        let digits = t.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let (number, unit) = t.split_at(digits);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let plain = |n: &str| !n.is_empty() && n.len() <= 15 && n.bytes().all(|b| b.is_ascii_digit());
        if !plain(whole) || !plain(fraction) {
            return Err(malformed());
        }
        let shift = match unit {
            "" => return Err(QuantityError::NoUnit(t.to_owned())),
            "Ki" => 10,
            "Mi" => 20,
            "Gi" => 30,
            "Ti" => 40,
            "Pi" => 50,
            unit if unit.trim().bytes().all(|b| b.is_ascii_alphabetic()) => {
                return Err(QuantityError::Unit { number: number.to_owned(), unit: unit.trim().to_owned() });
            }
            _ => return Err(malformed()),
        };
        let whole: u128 = whole.parse().map_err(|_| malformed())?;
        let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or_default());
        let fraction: u128 = fraction.parse().map_err(|_| malformed())?;
        let bytes = (whole * scale + fraction).checked_shl(shift).unwrap_or(u128::MAX) / scale;
        // An exabyte; far below what the sum over a gang could overflow with.
        if bytes > 1 << 60 {
            return Err(QuantityError::TooLarge(t.to_owned()));
        }
        u64::try_from(bytes).map(Quantity).map_err(|_| malformed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_exactly_or_refused() {
        assert_eq!("200Gi".parse(), Ok(Quantity(200 << 30)));
        assert_eq!("1.5Ti".parse(), Ok(Quantity(3 << 39)));
        assert_eq!("64Mi".parse(), Ok(Quantity(64 << 20)));
        let help = |t: &str| t.parse::<Quantity>().err().map(|e| e.help());
        assert_eq!(help("200GB").as_deref(), Some("write `200Gi`"));
        assert_eq!(help("200 gb").as_deref(), Some("write `200Gi`"));
        assert_eq!(help("512m").as_deref(), Some("write `512Mi`"));
        assert_eq!(help("200").as_deref(), Some("write `200Gi`, or another of Ki, Mi, Gi, Ti"));
        for text in ["", "Gi", "-1Gi", "1.2.3Gi", "1e3Gi", "9999999999Pi", "1 2Gi"] {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }
}
