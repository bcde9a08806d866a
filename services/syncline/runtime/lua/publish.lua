-- ARGV: for each record: trajectory, attempt, number and epoch of the oldest span, how many parts follow, and
-- the record's fields. For each: 'published' (also when it was already), 'fenced', or what the ledger says was
-- begun ('epoch.number').
local starts, ids, at = {}, {}, 1
while at <= #ARGV do
  starts[#starts + 1], ids[#ids + 1] = at, ARGV[at]
  at = at + 5 + tonumber(ARGV[at + 4])
end
local answers, kept, done, fenced = {}, {}, {}, 0
for i, e in ipairs(entries_of(ids)) do
  local at = starts[i]
  local attempt = tonumber(ARGV[at + 1])
  -- a running one that nobody has begun was begun at a server that has forgotten it: it is sampled again
  if not e or e[ATTEMPT] ~= attempt or e[STATE] ~= 'running' or e[NUMBER] < 0 then
    local held = e and e[STATE] ~= 'running' and (e[RECORD] ~= '' or e[STATE] == 'trained')
    answers[i] = held and e[ATTEMPT] == attempt and 'published' or 'fenced'
    if answers[i] == 'fenced' then fenced = fenced + 1 end
  elseif e[NUMBER] ~= tonumber(ARGV[at + 2]) or e[EPOCH] ~= tonumber(ARGV[at + 3]) then
    answers[i] = e[EPOCH] .. '.' .. e[NUMBER]
  else
    local last = at + 4 + tonumber(ARGV[at + 4])
    for field = at + 5, last, 2 do
      if ARGV[field] == 'l' then e[SAMPLED] = #ARGV[field + 1] / 4 end
    end
    e[RECORD] = call('XADD', RECORDS, '*', unpack(ARGV, at + 5, last))
    done[#done + 1] = e[WORK_ID]
    e[STATE], e[WORK_ID] = 'buffered', ''
    kept[#kept + 1], kept[#kept + 2] = ids[i], pack(e)
    answers[i] = 'published'
  end
end
if #done > 0 then
  each('HSET', ENTRIES, kept)
  each('XACK', WORK, done, 'rollout')
  each('XDEL', WORK, done)
  count('running', -#done)
  count('buffered', #done)
end
if fenced > 0 then count('fenced', fenced) end
return answers
