-- ARGV: job; then trajectory, attempt, state and packed reward of each. For each, in order: 1, or 0: fenced or rewarded
-- already. What one is told counts for those behind it.
local ids, answers, kept, rewards, left, refused = {}, {}, {}, {}, {}, 0
for at = 2, #ARGV, 4 do ids[#ids + 1] = ARGV[at] end
local lines = entries_of(ids)
for i, e in ipairs(lines) do
  local id, at = ids[i], 4 * i - 2
  if not e or e[STATE] ~= 'buffered' or e[ATTEMPT] ~= tonumber(ARGV[at + 1]) or e[REWARD] ~= '' or rewards[id] then
    refused = refused + 1
    answers[i] = 0
  else
    e[REWARD] = ARGV[at + 2]
    kept[#kept + 1], kept[#kept + 2] = id, pack(e)
    rewards[#rewards + 1], rewards[#rewards + 2], rewards[id] = id, ARGV[at + 3], true
    left[e[GROUP]] = (left[e[GROUP]] or 0) + 1
    answers[i] = 1
  end
end
keep_held(kept)
each('HSET', REWARDS, rewards)
-- each group once, when the last of its rewards is reached
local given = {}
for i, e in ipairs(lines) do
  local name = e and e[GROUP]
  if answers[i] == 1 then
    given[name] = (given[name] or 0) + 1
    if given[name] == left[name] then
      local g = group_of(name)
      g[ACCOUNTED] = g[ACCOUNTED] + given[name]
      settle(name, g)
    end
  end
end
if refused > 0 then count('refused', refused) end
return answers
