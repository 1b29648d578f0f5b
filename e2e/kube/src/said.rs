//! What commands of Aviflow's print.

use anyhow::{Result, ensure};
use serde_json::Value;
use std::process::Output;

/// What a command printed that is to succeed.
///
/// # Errors
/// If it failed; the error quotes it.
pub(crate) fn printed(args: &[&str], out: &Output) -> Result<String> {
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "`aviflow {}` ended with {}: {error}", args.join(" "), out.status);
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Use by state sums to the capacity, to the millisecond; it is what [`BY_STATE`] prints.
///
/// # Errors
/// If it does not.
pub fn partitions(usage: &Value) -> Result<()> {
    let rows = usage["rows"].as_array().cloned().unwrap_or_default();
    let sum: i64 = rows.iter().filter_map(|row| row["total"].as_i64()).sum();
    ensure!(usage["capacity"].as_i64() == Some(sum) && sum > 0, "GPU-milliseconds are missing: {usage}");
    Ok(())
}

/// The command for [`partitions`].
pub const BY_STATE: [&str; 3] = ["usage", "--by", "state"];
