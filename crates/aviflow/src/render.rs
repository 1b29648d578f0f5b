//! What a person reads. Pure: REST types, the time and the width in, text out.

pub mod acts;
pub mod drain;
pub mod job;
pub mod jobs;
pub mod number;
pub mod observed;
pub mod plan;
pub mod platform;
pub mod queue;
pub mod simulate;
pub mod stacks;
pub mod style;
pub mod summary;
pub mod table;
pub mod top;
pub mod usage;
pub mod waiting;

use style::Style;

/// Where and when something is rendered.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Now, in milliseconds since 1970.
    pub now: i64,
    /// Columns, where the output is a terminal.
    pub width: Option<usize>,
    /// Colours or none.
    pub style: Style,
}

#[cfg(test)]
pub mod samples;
