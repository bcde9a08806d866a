"""The ledger's transitions as Lua: each runs atomically on the server, and a second run changes nothing.

`ledger.py` holds the calling contract; nobody else loads these. All scripts share KEYS (in the order of the
first line below) and the prelude. Stored shapes, msgpack arrays (a number is -1 and a string empty where
there is none):

  entry  state, attempt, worker, version number and epoch begun, group, index, prompt, update, work item id,
         record id, reason, reward state, token of the last retry, sampled tokens of the record
  group  size, members accounted (rewarded or ended), members ended, oldest version number begun by a living
         member, phase (open, ready, claimed), update it is claimed for
  claim  version, claimed version before, groups as (group, living trajectories, ended ones)

COUNTS also keeps `oldest:V`: how many unclaimed groups have V as their oldest version. The lag decisions need
those sums alone, so their cost does not grow with the number of groups.
"""

from __future__ import annotations

_PRELUDE = """
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
"""

_GROUPS = """
local function group_of(g) return unpack_(call('HGET', GROUPS, g)) end
local function keep_group(name, g) call('HSET', GROUPS, name, pack(g)) end
local function member(group, index) return ARGV[1] .. '-' .. group .. '-' .. index end

-- One more (or fewer) unclaimed group has `version` as its oldest.
local function tally(version, by)
  if version >= 0 and call('HINCRBY', COUNTS, 'oldest:' .. version, by) == 0 then
    call('HDEL', COUNTS, 'oldest:' .. version)
  end
end

local function set_oldest(g, version)
  if g[PHASE] ~= 'claimed' and g[OLDEST] ~= version then
    tally(g[OLDEST], -1)
    tally(version, 1)
  end
  g[OLDEST] = version
end

-- The oldest version begun by a living member other than `except`, -1 if there is none.
local function oldest_living(name, g, except)
  local oldest = -1
  for index = 0, g[SIZE] - 1 do
    local id = member(name, index)
    local e = id ~= except and entry_of(id)
    if e and (e[STATE] == 'running' or e[STATE] == 'buffered') and e[NUMBER] >= 0 then
      if oldest < 0 or e[NUMBER] < oldest then oldest = e[NUMBER] end
    end
  end
  return oldest
end

-- After a member was accounted for: the group may join `ready`, or leave if no member lives.
local function settle(name, g)
  if g[PHASE] ~= 'claimed' then
    if g[ENDED] == g[SIZE] then
      set_oldest(g, -1)
      call('ZREM', READY, string.format('%012d', name))
      call('HDEL', GROUPS, name)
      count('groups_lost', 1)
      return
    end
    if g[ACCOUNTED] == g[SIZE] then
      g[PHASE] = 'ready'
      call('ZADD', READY, g[OLDEST], string.format('%012d', name))
    end
  end
  keep_group(name, g)
end

-- End a living member without training it: its work item and record go, and its group is settled.
local function finish(id, e, state, reason)
  local name = e[GROUP]
  local g = group_of(name)
  if e[STATE] == 'running' or e[REWARD] == '' then g[ACCOUNTED] = g[ACCOUNTED] + 1 end
  g[ENDED] = g[ENDED] + 1
  if e[STATE] == 'running' then
    call('XACK', WORK, 'rollout', e[WORK_ID])
    call('XDEL', WORK, e[WORK_ID])
  else
    call('XACK', RECORDS, 'trainer', e[RECORD])
    call('XDEL', RECORDS, e[RECORD])
    call('HDEL', REWARDS, id)
  end
  count(e[STATE], -1)
  count(state, 1)
  e[STATE], e[REASON], e[WORK_ID], e[RECORD] = state, reason, '', ''
  keep(id, e)
  if e[NUMBER] >= 0 and e[NUMBER] == g[OLDEST] then set_oldest(g, oldest_living(name, g, id)) end
  settle(name, g)
  if state == 'failed' then
    local letter = {'trajectory', id, 'attempt', e[ATTEMPT], 'reason', reason}
    call('XADD', DEAD, 'MAXLEN', '~', 10000, '*', unpack(letter))
  end
end

-- Give a running member to its next attempt: what it had begun no longer counts.
local function again(id, e)
  local name = e[GROUP]
  local g = group_of(name)
  local begun = e[NUMBER]
  e[ATTEMPT], e[WORKER], e[NUMBER], e[EPOCH] = e[ATTEMPT] + 1, '', -1, -1
  keep(id, e)
  if begun >= 0 and begun == g[OLDEST] then
    set_oldest(g, oldest_living(name, g, id))
    keep_group(name, g)
  end
end
"""

_BREACH = """
-- contract/lag.py `first_breach`: the first version by which more unclaimed groups are due than the updates
-- after `claimed` can take, or false. `change` (version -> how many more groups) is counted in.
local function breach(claimed, batch, max_lag, change)
  local of, versions = {}, {}
  local flat = call('HGETALL', COUNTS)
  for i = 1, #flat, 2 do
    local version = tonumber(string.match(flat[i], '^oldest:(%d+)$'))
    if version then of[version] = tonumber(flat[i + 1]) end
  end
  for version, by in pairs(change) do of[version] = (of[version] or 0) + by end
  for version, groups in pairs(of) do if groups > 0 then versions[#versions + 1] = version end end
  table.sort(versions)
  local total = 0
  for _, version in ipairs(versions) do
    total = total + of[version]
    local due = version + max_lag
    if total > math.max(0, due - claimed) * batch then return due end
  end
  return false
end
"""

SUBMIT = (
    _PRELUDE
    + """
-- ARGV: group, size, then for each member: trajectory, index, prompt, packed work item. 1; 0: known already.
local group, size = tonumber(ARGV[1]), tonumber(ARGV[2])
if call('HEXISTS', ENTRIES, ARGV[3]) == 1 then return 0 end
for i = 3, #ARGV, 4 do
  local work = call('XADD', WORK, '*', 'm', ARGV[i + 3])
  local index, prompt = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  keep(ARGV[i], {'running', 1, '', -1, -1, group, index, prompt, -1, work, '', '', '', '', -1})
end
call('HSET', GROUPS, group, pack({size, 0, 0, -1, 'open', -1}))
count('submitted', size)
count('running', size)
return 1
"""
)

BEGIN = (
    _PRELUDE
    + _GROUPS
    + _BREACH
    + """
-- ARGV: job, trajectory, attempt, worker, number, epoch, batch, max_lag, policy. 'go', 'wait', 'fenced'.
local id, worker, number, epoch = ARGV[2], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local batch, max_lag = tonumber(ARGV[7]), tonumber(ARGV[8])
local e = entry_of(id)
local mine = e and e[STATE] == 'running' and e[ATTEMPT] == tonumber(ARGV[3])
if not mine or (e[NUMBER] >= 0 and e[WORKER] ~= worker) then
  count('fenced', 1)
  return 'fenced'
end
if e[NUMBER] == number and e[EPOCH] == epoch then return 'go' end
local name = e[GROUP]
local g = group_of(name)
local others = g[OLDEST]
if e[NUMBER] >= 0 and e[NUMBER] == others then others = oldest_living(name, g, id) end
if others < 0 or number < others then
  local claimed = tonumber(call('HGET', CLAIMS, 'version') or -1)
  local late
  if ARGV[9] == 'wait' then
    local change = {[number] = 1}
    if g[OLDEST] >= 0 then change[g[OLDEST]] = (change[g[OLDEST]] or 0) - 1 end
    late = breach(claimed, batch, max_lag, change)
  else
    late = number + max_lag <= claimed
  end
  if late then return 'wait' end
end
e[WORKER], e[NUMBER], e[EPOCH] = worker, number, epoch
keep(id, e)
set_oldest(g, (others < 0 or number < others) and number or others)
keep_group(name, g)
return 'go'
"""
)

PUBLISH = (
    _PRELUDE
    + """
-- ARGV: trajectory, attempt, number and epoch of the oldest span, then the record's fields.
-- 'published' (also when it was already), 'fenced', or what the ledger says was begun ('number.epoch').
local id, attempt = ARGV[1], tonumber(ARGV[2])
local e = entry_of(id)
if not e or e[ATTEMPT] ~= attempt or e[STATE] ~= 'running' then
  local held = e and (e[RECORD] ~= '' or e[STATE] == 'trained')
  if held and e[ATTEMPT] == attempt then return 'published' end
  count('fenced', 1)
  return 'fenced'
end
if e[NUMBER] ~= tonumber(ARGV[3]) or e[EPOCH] ~= tonumber(ARGV[4]) then
  return e[EPOCH] .. '.' .. e[NUMBER]
end
for i = 5, #ARGV, 2 do
  if ARGV[i] == 'l' then e[SAMPLED] = #ARGV[i + 1] / 4 end
end
e[RECORD] = call('XADD', RECORDS, '*', unpack(ARGV, 5))
call('XACK', WORK, 'rollout', e[WORK_ID])
call('XDEL', WORK, e[WORK_ID])
e[STATE], e[WORK_ID] = 'buffered', ''
keep(id, e)
count('running', -1)
count('buffered', 1)
return 'published'
"""
)

RETRY = (
    _PRELUDE
    + _GROUPS
    + """
-- ARGV: job, trajectory, work item, reason, most attempts, token of this call. The new attempt, or 0: ended.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'running' then
  call('XACK', WORK, 'rollout', ARGV[3])
  call('XDEL', WORK, ARGV[3])
  return 0
end
if e[RETRY] == ARGV[6] then return e[ATTEMPT] end
e[RETRY] = ARGV[6]
count('retried', 1)
if e[ATTEMPT] >= tonumber(ARGV[5]) then
  finish(id, e, 'failed', ARGV[4])
  return 0
end
again(id, e)
return e[ATTEMPT]
"""
)

RESUBMIT = (
    _PRELUDE
    + _GROUPS
    + """
-- ARGV: job, trajectory, packed work item. The new attempt; 0: not running, or its work item is there.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'running' then return 0 end
if #call('XRANGE', WORK, e[WORK_ID], e[WORK_ID]) > 0 then return 0 end
e[WORK_ID] = call('XADD', WORK, '*', 'm', ARGV[3])
again(id, e)
count('resubmitted', 1)
return e[ATTEMPT]
"""
)

REWARD = (
    _PRELUDE
    + _GROUPS
    + """
-- ARGV: job, trajectory, attempt, state, packed reward. 1, or 0: fenced or rewarded already.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'buffered' or e[ATTEMPT] ~= tonumber(ARGV[3]) or e[REWARD] ~= '' then
  count('refused', 1)
  return 0
end
e[REWARD] = ARGV[4]
keep(id, e)
call('HSET', REWARDS, id, ARGV[5])
local g = group_of(e[GROUP])
g[ACCOUNTED] = g[ACCOUNTED] + 1
settle(e[GROUP], g)
return 1
"""
)

CLAIM = (
    _PRELUDE
    + _GROUPS
    + _BREACH
    + """
-- ARGV: job, update, version, batch, max_lag, policy. A claim; nil: wait; or a story that breaks the law.
local update, version = tonumber(ARGV[2]), tonumber(ARGV[3])
local batch, max_lag, policy = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local known = call('HGET', CLAIMS, update)
if known then return known end
local from = policy == 'expire' and version - max_lag or '-inf'
local flat = call('ZRANGE', READY, from, '+inf', 'BYSCORE', 'LIMIT', 0, batch, 'WITHSCORES')
if #flat < 2 * batch then return false end
local change = {}
for i = 2, #flat, 2 do
  local oldest = tonumber(flat[i])
  change[oldest] = (change[oldest] or 0) - 1
end
if policy == 'wait' then
  if tonumber(flat[2]) + max_lag < version then
    return {'group ' .. tonumber(flat[1]) .. ' began under version ' .. flat[2]}
  end
  if breach(version, batch, max_lag, change) then return false end
end
local groups = {}
for i = 1, #flat, 2 do
  local name = tonumber(flat[i])
  local g = group_of(name)
  tally(g[OLDEST], -1)
  g[PHASE], g[CLAIM] = 'claimed', update
  keep_group(name, g)
  call('ZREM', READY, flat[i])
  local living, ended = {}, {}
  for index = 0, g[SIZE] - 1 do
    local id = member(name, index)
    local list = entry_of(id)[STATE] == 'buffered' and living or ended
    list[#list + 1] = id
  end
  groups[#groups + 1] = {name, living, ended}
end
local before = tonumber(call('HGET', CLAIMS, 'version') or -1)
local claim = pack({version, before, groups})
call('HSET', CLAIMS, update, claim, 'version', version)
count('claimed', #groups)
return claim
"""
)

UNCLAIM = (
    _PRELUDE
    + _GROUPS
    + """
-- ARGV: job, update. 1, or 0: there is no such claim.
local raw = call('HGET', CLAIMS, ARGV[2])
if not raw then return 0 end
local version, before, groups = unpack(unpack_(raw))
for _, claimed in ipairs(groups) do
  local name = claimed[1]
  local g = group_of(name)
  local oldest = g[OLDEST]
  g[PHASE], g[CLAIM], g[OLDEST] = 'open', -1, -1
  set_oldest(g, oldest)
  settle(name, g)
end
call('HDEL', CLAIMS, ARGV[2])
if tonumber(call('HGET', CLAIMS, 'version')) == version then call('HSET', CLAIMS, 'version', before) end
count('claimed', -#groups)
return 1
"""
)

TRAINED = (
    _PRELUDE
    + """
-- ARGV: update, trajectories. nil when done (also when it was already), or a story that breaks the law.
local update = tonumber(ARGV[1])
local raw = call('HGET', CLAIMS, ARGV[1])
if not raw then
  for i = 2, #ARGV do
    local e = entry_of(ARGV[i])
    if not e then return ARGV[i] .. ' is unknown' end
    if e[STATE] ~= 'trained' or e[UPDATE] ~= update then
      return ARGV[i] .. ' is ' .. e[STATE] .. ' (update ' .. e[UPDATE] .. '), and nothing is claimed now'
    end
  end
  return false
end
local groups = unpack_(raw)[3]
local asked, left, entries, lost = {}, #ARGV - 1, {}, 0
for i = 2, #ARGV do asked[ARGV[i]] = true end
for _, claimed in ipairs(groups) do
  local any = false
  for _, id in ipairs(claimed[2]) do
    local e = entry_of(id)
    if e[STATE] == 'buffered' and not asked[id] then
      return id .. ' is claimed and neither trained nor ended'
    end
    if e[STATE] ~= 'buffered' and asked[id] then return id .. ' has ended as ' .. e[STATE] end
    if asked[id] then
      entries[#entries + 1] = {id, e}
      any = true
    end
  end
  if not any then lost = lost + 1 end
end
if #entries ~= left then return 'some of the trajectories are not claimed for it, or named twice' end
for _, pair in ipairs(entries) do
  pair[2][STATE], pair[2][UPDATE] = 'trained', update
  keep(pair[1], pair[2])
end
for _, claimed in ipairs(groups) do call('HDEL', GROUPS, claimed[1]) end
call('HDEL', CLAIMS, ARGV[1])
count('buffered', -#entries)
count('trained', #entries)
count('claimed', -#groups)
if lost > 0 then count('groups_lost', lost) end
return false
"""
)

END = (
    _PRELUDE
    + _GROUPS
    + """
-- ARGV: job, trajectory, state, reason. 1; 0: it has ended already; -1: unknown.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e then return -1 end
if e[STATE] ~= 'running' and e[STATE] ~= 'buffered' then return 0 end
finish(id, e, ARGV[3], ARGV[4])
return 1
"""
)

FORGET = (
    _PRELUDE
    + """
-- ARGV: trajectories. Removes records and rewards of ended ones; nil, or a story that breaks the law.
local found = {}
for i, id in ipairs(ARGV) do
  local e = entry_of(id)
  if e and (e[STATE] == 'running' or e[STATE] == 'buffered') then return id .. ' is ' .. e[STATE] end
  found[i] = e
end
for i, id in ipairs(ARGV) do
  local e = found[i]
  if e and e[RECORD] ~= '' then
    call('XACK', RECORDS, 'trainer', e[RECORD])
    call('XDEL', RECORDS, e[RECORD])
    e[RECORD] = ''
    keep(id, e)
  end
  call('HDEL', REWARDS, id)
end
return false
"""
)
