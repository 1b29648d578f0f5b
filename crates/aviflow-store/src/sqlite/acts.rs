//! What people did: written with what it changed, read newest first.

use super::schema::sql;
use super::write::execute;
use crate::convert::{act_kind, int, uint};
use crate::read::{ActFilter, ActRow, PAGE};
use aviflow_core::time::Time;
use aviflow_engine::ports::{Act, ActKind, StoreError};
use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};

pub(super) fn read(conn: &Connection, filter: &ActFilter) -> Result<Vec<ActRow>, StoreError> {
    let mut text = String::from("SELECT id, at, by, what, kind, name, reason FROM acts WHERE true");
    let mut params: Vec<Value> = Vec::new();
    let equal =
        [("kind", filter.kind.map(|k| k.name().to_owned())), ("name", filter.name.clone()), ("by", filter.by.clone())];
    for (column, wanted) in equal {
        if let Some(wanted) = wanted {
            text.push_str(&format!(" AND {column} = ?"));
            params.push(Value::Text(wanted));
        }
    }
    if let Some(before) = filter.before {
        text.push_str(" AND id < ?");
        params.push(Value::Integer(int(before)));
    }
    text.push_str(" ORDER BY id DESC LIMIT ?");
    params.push(Value::Integer(if filter.limit == 0 { i64::from(PAGE) } else { i64::from(filter.limit) }));
    let mut query = conn.prepare_cached(&text).map_err(sql)?;
    let mut rows = query.query(params_from_iter(params)).map_err(sql)?;
    let mut out = Vec::new();
    while let Some(r) = rows.next().map_err(sql)? {
        let kind = act_kind(&r.get::<_, String>(4).map_err(sql)?)?;
        out.push(row(r, kind).map_err(sql)?);
    }
    Ok(out)
}

fn row(r: &Row<'_>, kind: ActKind) -> rusqlite::Result<ActRow> {
    let act = Act { at: Time(r.get(1)?), by: r.get(2)?, what: r.get(3)?, kind, name: r.get(5)?, reason: r.get(6)? };
    Ok(ActRow { row: uint(r.get(0)?), act })
}

pub(super) fn write(conn: &Connection, acts: &[Act]) -> Result<(), StoreError> {
    for act in acts {
        let text = "INSERT INTO acts (at, by, what, kind, name, reason) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
        execute(conn, text, (act.at.0, &act.by, &act.what, act.kind.name(), &act.name, &act.reason))?;
    }
    Ok(())
}
