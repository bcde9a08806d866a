local ENTRIES, COUNTS, GROUPS, READY, REWARDS, CLAIMS, WORK, RECORDS, DEAD = unpack(KEYS)
local STATE, ATTEMPT, WORKER, NUMBER, EPOCH, GROUP, INDEX, PROMPT = 1, 2, 3, 4, 5, 6, 7, 8
local UPDATE, WORK_ID, RECORD, REASON, REWARD, RETRY, SAMPLED = 9, 10, 11, 12, 13, 14, 15
local SIZE, ACCOUNTED, ENDED, OLDEST, PHASE, CLAIM = 1, 2, 3, 4, 5, 6
local call, pack, unpack_ = redis.call, cmsgpack.pack, cmsgpack.unpack

local function entry_of(id)
  local raw = call('HGET', ENTRIES, id)
  return raw and unpack_(raw)
end
local function keep(id, e) call('HSET', ENTRIES, id, pack(e)) end
local function count(name, by) call('HINCRBY', COUNTS, name, by) end
