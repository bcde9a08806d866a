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

-- A living member's entry ends: its work item, record and reward go.
local function close(id, e, state, reason)
  if e[STATE] == 'running' then
    call('XACK', WORK, 'rollout', e[WORK_ID])
    call('XDEL', WORK, e[WORK_ID])
  else
    call('XDEL', RECORDS, e[RECORD])
    call('HDEL', REWARDS, id)
  end
  count(e[STATE], -1)
  count(state, 1)
  e[STATE], e[REASON], e[WORK_ID], e[RECORD] = state, reason, '', ''
  keep(id, e)
end

local function members_of(name, g)
  local ids = {}
  for index = 0, g[SIZE] - 1 do ids[index + 1] = member(name, index) end
  return ids, entries_of(ids)
end

-- A group leaves without an update.
local function leave(name, g)
  set_oldest(g, -1)
  call('ZREM', READY, string.format('%012d', name))
  call('HDEL', GROUPS, name)
  count('groups_lost', 1)
end

-- Every member has ended: it failed if one of them failed, else it expired if one expired, else it was filtered.
local function lose(name, g)
  local _, members = members_of(name, g)
  local weight = {filtered = 1, expired = 2, failed = 3}
  local worst = members[1]
  for _, e in ipairs(members) do if weight[e[STATE]] > weight[worst[STATE]] then worst = e end end
  leave(name, g)
  tell(name, worst[PROMPT], worst[STATE], worst[REASON], 0, 0, 0, 0)
end

-- Every member is accounted for and one lives. True: there is nothing to learn from them, and all have ended.
local function sifted(name, g)
  if (g[DEMAND] or '') == '' then return false end
  local ids, members = members_of(name, g)
  local living = {}
  for i, e in ipairs(members) do if e[STATE] == 'buffered' then living[#living + 1] = ids[i] end end
  local n, mean, low, high = scores_of(living)
  local why
  if n < 2 then
    why = 'fewer than two scored members'
  elseif g[DEMAND] == 'whole' and n < g[SIZE] then
    why = 'incomplete'
  elseif low == high then
    why = 'all rewards are ' .. string.format('%.6g', low)
  else
    return false
  end
  for i, e in ipairs(members) do
    if e[STATE] == 'buffered' then close(ids[i], e, 'filtered', why) end
  end
  g[ENDED] = g[SIZE]
  leave(name, g)
  tell(name, members[1][PROMPT], 'filtered', why, n, mean, low, high)
  return true
end

-- After a member was accounted for: the group may join `ready`, or leave if no member lives.
local function settle(name, g)
  if g[PHASE] ~= 'claimed' then
    if g[ENDED] == g[SIZE] then return lose(name, g) end
    if g[ACCOUNTED] == g[SIZE] then
      if sifted(name, g) then return end
      g[PHASE] = 'ready'
      call('ZADD', READY, g[OLDEST], string.format('%012d', name))
    end
  end
  keep_group(name, g)
end

-- End a living member without training it, and settle its group.
local function finish(id, e, state, reason)
  local name = e[GROUP]
  local g = group_of(name)
  if e[STATE] == 'running' or e[REWARD] == '' then g[ACCOUNTED] = g[ACCOUNTED] + 1 end
  g[ENDED] = g[ENDED] + 1
  close(id, e, state, reason)
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
