//! The standard environments of the repository are valid, each under the name of its folder.

use aviflow_api::environment::{check_lock, parse_environment};
use std::path::Path;

#[test]
fn the_standard_environments_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../environments");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(text) = std::fs::read(folder.join("environment.yaml")) else { continue };
        let name = folder.file_name().and_then(|n| n.to_str());
        let parsed = parse_environment("environment.yaml", &text, name).unwrap_or_else(|e| panic!("{name:?}: {e:#?}"));
        assert_eq!(parsed.warnings, [], "{name:?}");
        let lock = std::fs::read(folder.join(&parsed.description.requirements)).unwrap();
        assert_eq!(check_lock("requirements.lock", &lock), [], "{name:?}");
        seen += 1;
    }
    assert!(seen >= 2);
}
