//! `store`: backup and restore.

use super::App;
use crate::cli::StoreCommand;
use crate::error::{Failure, Result};
use crate::output::print;

/// `aviflow store`
pub fn store(app: &App, command: StoreCommand) -> Result<()> {
    if !app.is_local() {
        return Err(Failure::new("only the store of this machine can be backed up from here")
            .help("run this where the control plane runs"));
    }
    if let Some(address) = crate::serve::store::remembered(&app.home) {
        let pg = match &command {
            StoreCommand::Backup { .. } => "`pg_dump --schema=aviflow` makes a backup while it is in use",
            StoreCommand::Restore { .. } => "`psql` puts one in place; the numbers must be raised then",
        };
        return Err(Failure::new(format!("the store of this control plane is in PostgreSQL, at {address}"))
            .help(format!("{pg}; docs/admin/backup.md has the steps")));
    }
    let failed = |e: aviflow_engine::ports::StoreError| Failure::new(e.to_string());
    match command {
        StoreCommand::Backup { file } => {
            let reader = aviflow_store::sqlite::SqliteReader::open(app.home.path()).map_err(failed)?;
            reader.backup(&file).map_err(failed)?;
            print(&format!(
                "backed up the store in {} to {}\nlogs and code snapshots are not in it: copy {} too\n",
                app.home.path().display(),
                file.display(),
                app.home.join("objects").display()
            ));
            Ok(())
        }
        StoreCommand::Restore { file } => {
            let _lock = app.home.lock_server()?;
            aviflow_store::sqlite::restore(&file, app.home.path()).map_err(failed)?;
            print(&format!(
                "restored the store in {} from {}\nstart it with `aviflow server start`\n",
                app.home.path().display(),
                file.display()
            ));
            Ok(())
        }
    }
}
