//! `stacks`.

use super::App;
use crate::cli::StacksArgs;
use crate::error::Result;
use crate::render::stacks::{stacks as render, taken_then};
use aviflow_api::rest::AskStacks;

/// `aviflow stacks`
pub fn stacks(app: &App, args: &StacksArgs) -> Result<()> {
    if args.last {
        let taken = app.client()?.last_stacks(&args.job)?;
        return app.output.answer(args.output.format, &taken, |view| taken_then(&taken, args.all, view));
    }
    let stacks = app.client()?.stacks(&args.job, &AskStacks { rank: args.rank })?;
    app.output.answer(args.output.format, &stacks, |view| render(&stacks, args.all, view))
}
