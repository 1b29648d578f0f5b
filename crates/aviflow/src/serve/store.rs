//! Which store the control plane has: the file in its home folder, or a database.
//!
//! A control plane that came up on another store than before would find nothing in it and
//! stop every training it meets. So the home folder remembers a database, and a start
//! that does not name one is refused there.

use super::store_failure;
use crate::error::{Failure, Result, While};
use crate::home::Home;
use crate::output::note;
use aviflow_engine::ports::Store;
use aviflow_store::{Keeper, PostgresStore, Reader, SqliteStore};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What names the file in the home folder.
const FILE: &str = "sqlite";

/// A store, with what reads it and what deletes what is old.
pub struct Stores {
    pub store: Box<dyn Store + Send>,
    pub reader: Arc<dyn Reader>,
    pub keeper: Box<dyn Keeper>,
}

/// What `store.json` says.
#[derive(Serialize, Deserialize)]
struct StoreFile {
    /// The database's address, without its password.
    address: String,
}

/// A store that is chosen and not taken: nothing of it was changed.
#[derive(Debug)]
pub enum Choice {
    /// The file in the home folder.
    File,
    /// A database, which answers.
    Database(Box<PostgresStore>),
}

/// Finds the store that is asked for.
pub fn choose(home: &Home, asked: Option<&str>) -> Result<Choice> {
    match (asked, remembered(home)) {
        (None, Some(address)) => Err(Failure::usage(format!(
            "the store of the control plane in {} is in PostgreSQL, at {address}, and no store was named",
            home.path().display()
        ))
        .help(
            "set AVIFLOW_STORE to its address, with the password; with `--store sqlite` it begins with the file in \
             the home folder instead, and trainings that the file does not know are stopped",
        )),
        (None | Some("" | FILE), _) => Ok(Choice::File),
        (Some(address), _) if address.starts_with("postgres://") || address.starts_with("postgresql://") => {
            let store = PostgresStore::open(address).map_err(store_failure)?;
            note(&format!("the store is {}", store.shown()));
            Ok(Choice::Database(Box::new(store)))
        }
        // Not repeated: it may be an address with a password and a slip of the pen.
        (Some(_), _) => Err(Failure::usage("the store is neither `sqlite` nor an address of a PostgreSQL database")
            .help("write --store postgres://USER:PASSWORD@HOST:PORT/DATABASE, or set AVIFLOW_STORE to it")),
    }
}

impl Choice {
    /// Whether several control planes can have it, of which one writes.
    pub fn is_shared(&self) -> bool {
        matches!(self, Choice::Database(_))
    }

    /// Opens it for the one that is to write, who calls itself `me`. The home folder keeps to it from now on.
    pub fn open(self, home: &Home, me: &str) -> Result<Stores> {
        match self {
            Choice::File => file(home),
            Choice::Database(store) => database(home, store.called(me)),
        }
    }
}

fn file(home: &Home) -> Result<Stores> {
    let store = SqliteStore::open(home.path()).map_err(store_failure)?;
    let reader = Arc::new(store.reader().map_err(store_failure)?);
    let keeper = Box::new(store.keeper().map_err(store_failure)?);
    match std::fs::remove_file(home.join("store.json")) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("{} cannot be removed: {e}", home.join("store.json").display())));
        }
        _ => {}
    }
    Ok(Stores { store: Box::new(store), reader, keeper })
}

fn database(home: &Home, store: PostgresStore) -> Result<Stores> {
    let shown = store.shown().to_owned();
    let bytes = serde_json::to_vec_pretty(&StoreFile { address: shown })
        .or_fail(|| "store.json cannot be written".to_owned())?;
    home.write("store.json", &bytes)?;
    let (reader, keeper) = (Arc::new(store.reader()), Box::new(store.keeper()));
    Ok(Stores { store: Box::new(store), reader, keeper })
}

/// The database that has the store of this home folder, without its password; none where it is the file.
pub fn remembered(home: &Home) -> Option<String> {
    let bytes = std::fs::read(home.join("store.json")).ok()?;
    // Damaged, it is no file of the folder's own store all the same.
    let file = serde_json::from_slice(&bytes).unwrap_or(StoreFile { address: "an address that is lost".to_owned() });
    Some(file.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_store::contract::server::Server;

    fn opens(home: &Home, asked: Option<&str>) -> std::result::Result<u64, String> {
        match choose(home, asked).and_then(|choice| choice.open(home, "aviflow")) {
            Ok(mut stores) => Ok(stores.store.acquire().expect("it can be taken").term.0),
            Err(failure) => Err(failure.message),
        }
    }

    #[test]
    fn a_home_folder_keeps_to_its_database() {
        let folder = tempfile::tempdir().expect("folder");
        let home = Home::at(folder.path()).expect("home");
        assert_eq!(opens(&home, None), Ok(1));
        assert_eq!(opens(&home, Some("")), Ok(2), "an empty variable is none");
        let url = Server::shared().database().replace("user=aviflow", "user=aviflow&password=s3cret");
        assert_eq!(opens(&home, Some(&url)), Ok(1));
        let said = std::fs::read_to_string(home.join("store.json")).expect("it is remembered");
        assert!(said.contains("postgres://aviflow@") && !said.contains("s3cret"), "{said}");
        let refused = opens(&home, None).expect_err("no store was named");
        assert!(refused.contains("is in PostgreSQL, at postgres://aviflow@"), "{refused}");
        assert_eq!(opens(&home, Some(&url)), Ok(2));
        assert_eq!(opens(&home, Some("sqlite")), Ok(3));
        assert_eq!(remembered(&home), None);
    }

    #[test]
    fn what_is_no_store_is_refused_and_not_repeated() {
        let folder = tempfile::tempdir().expect("folder");
        let home = Home::at(folder.path()).expect("home");
        for asked in ["postgre://ada:s3cret@db/flow", "mysql://ada:s3cret@db/flow", "s3cret"] {
            let refused = opens(&home, Some(asked)).expect_err("it is none");
            assert!(!refused.contains("s3cret"), "{refused}");
        }
    }
}
