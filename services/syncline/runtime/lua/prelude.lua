local HELD, ENTRIES, COUNTS, GROUPS, READY, REWARDS, CLAIMS, WORK, RECORDS, DEAD, OUTCOMES = unpack(KEYS)
local STATE, ATTEMPT, WORKER, NUMBER, EPOCH, GROUP, INDEX, PROMPT = 1, 2, 3, 4, 5, 6, 7, 8
local UPDATE, WORK_ID, RECORD, REASON, REWARD, RETRY, SAMPLED = 9, 10, 11, 12, 13, 14, 15
local SIZE, ACCOUNTED, ENDED, OLDEST, PHASE, CLAIM, DEMAND = 1, 2, 3, 4, 5, 6, 7
local call, pack, unpack_, some_of = redis.call, cmsgpack.pack, cmsgpack.unpack, cmsgpack.unpack_limit

local function count(name, by) call('HINCRBY', COUNTS, name, by) end

-- Calls `command` with `first` and the list, in pieces that fit the Lua stack (pieces hold whole pairs).
local function each(command, first, list, second)
  for i = 1, #list, 2000 do
    local last = math.min(i + 1999, #list)
    if second then
      call(command, first, second, unpack(list, i, last))
    else
      call(command, first, unpack(list, i, last))
    end
  end
end

-- A line lies in HELD as long as a work item or a record is its own, and from then on in ENTRIES, which grows with the
-- job: a line goes there once. A job that was begun before there was HELD has them all in ENTRIES; they move when written.
local function entry_of(id)
  local raw = call('HGET', HELD, id) or call('HGET', ENTRIES, id)
  return raw and unpack_(raw)
end
-- Many fields of a hash, false where there is none.
local function values_of(key, fields)
  if #fields <= 2000 then return #fields > 0 and call('HMGET', key, unpack(fields)) or {} end
  local found = {}
  for i = 1, #fields, 2000 do
    for _, raw in ipairs(call('HMGET', key, unpack(fields, i, math.min(i + 1999, #fields)))) do
      found[#found + 1] = raw
    end
  end
  return found
end
-- Packed lines of many trajectories, false where there is none.
local function lines_of(ids)
  local found = values_of(HELD, ids)
  for i, raw in ipairs(found) do
    if not raw then found[i] = call('HGET', ENTRIES, ids[i]) end
  end
  return found
end
-- Their entries.
local function entries_of(ids)
  local found = lines_of(ids)
  for i, raw in ipairs(found) do found[i] = raw and unpack_(raw) end
  return found
end

-- A table of fifteen fields costs five times what reading or changing some of a packed line does. A line is an array of
-- at most 15 fields, so they begin behind one byte.

-- One field of a packed line.
local function field_of(raw, at)
  if at == 1 then
    local _, value = some_of(raw, 1, 1)
    return value
  end
  local _, value = some_of(raw, 1, (some_of(raw, at - 1, 1)))
  return value
end
-- Lines that hold something: id, packed line, id, packed line.
local function keep_held(kept)
  for i = 1, #kept, 2000 do
    local last = math.min(i + 1999, #kept)
    if call('HSET', HELD, unpack(kept, i, last)) > 0 then
      for n = i, last, 2 do call('HDEL', ENTRIES, kept[n]) end
    end
  end
end
local function keep(id, e)
  if e[WORK_ID] ~= '' or e[RECORD] ~= '' then return keep_held({id, pack(e)}) end
  call('HSET', ENTRIES, id, pack(e))
  call('HDEL', HELD, id)
end
