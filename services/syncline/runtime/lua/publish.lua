-- ARGV: packed list of {trajectory, attempt, number and epoch of the oldest span, sampled tokens, names of the record's
-- fields}, then all their fields in order. For each: 'published' (also when it was already), 'fenced', or what the ledger
-- says was begun ('epoch.number').
local told, ids, known = unpack_(ARGV[1]), {}, {}
for i, one in ipairs(told) do
  ids[i] = one[1]
  if not known[one[6]] then
    local names = {}
    for name in string.gmatch(one[6], '%S+') do names[#names + 1] = name end
    known[one[6]] = names
  end
end
local at = 2
local answers, kept, done, fenced = {}, {}, {}, 0
for i, e in ipairs(entries_of(ids)) do
  local _, attempt, number, epoch, sampled, names = unpack(told[i])
  names = known[names]
  -- a running one that nobody has begun was begun at a server that has forgotten it: it is sampled again
  if not e or e[ATTEMPT] ~= attempt or e[STATE] ~= 'running' or e[NUMBER] < 0 then
    local held = e and e[STATE] ~= 'running' and (e[RECORD] ~= '' or e[STATE] == 'trained')
    answers[i] = held and e[ATTEMPT] == attempt and 'published' or 'fenced'
    if answers[i] == 'fenced' then fenced = fenced + 1 end
  elseif e[NUMBER] ~= number or e[EPOCH] ~= epoch then
    answers[i] = e[EPOCH] .. '.' .. e[NUMBER]
  else
    local record = {}
    for n, name in ipairs(names) do record[2 * n - 1], record[2 * n] = name, ARGV[at + n - 1] end
    e[RECORD] = call('XADD', RECORDS, '*', unpack(record))
    done[#done + 1] = e[WORK_ID]
    e[STATE], e[WORK_ID], e[SAMPLED] = 'buffered', '', sampled
    kept[#kept + 1], kept[#kept + 2] = ids[i], pack(e)
    answers[i] = 'published'
  end
  at = at + #names
end
if #done > 0 then
  keep_held(kept)
  each('XACK', WORK, done, 'rollout')
  each('XDEL', WORK, done)
  count('running', -#done)
  count('buffered', #done)
end
if fenced > 0 then count('fenced', fenced) end
return answers
